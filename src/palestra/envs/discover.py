"""Lists environments by parsing source files; no code of a listed file runs."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from palestra.core import extras
from palestra.core.errors import (
    MissingPackageError,
    NotFoundError,
    PalestraError,
    SettingError,
    UserCodeError,
    did_you_mean,
)
from palestra.core.files import read_regular, slug
from palestra.envs.env import default_name

BASES = {"palestra.Env": "palestra", "palestra.envs.env.Env": "palestra", "atroposlib.envs.base.BaseEnv": "atropos"}
LIBRARY = extras.folder("environments")
FAMILY = "reasoning_gym"
ENTRY_POINTS = "palestra.environments"
PATH_VARIABLE = "PALESTRA_ENV_PATH"
MAX_FILES = 5000
MAX_REEXPORTS = 5
MAX_BYTES = 2_000_000  # a longer file is data, not an environment

Origin = Literal["built-in", "configured", "installed"]


@dataclass(frozen=True)
class DiscoveredEnv:
    """An environment, as its source describes it. `dialect` says whose base class it has."""

    name: str
    class_name: str
    file_path: Path
    description: str
    origin: Origin
    dialect: str = "palestra"
    config_class: str | None = None
    preset: Mapping[str, Any] = field(default_factory=dict)  # config values that its name stands for


@dataclass(frozen=True)
class Discovery:
    """All environments, and the files that could not be read, with the reason."""

    environments: tuple[DiscoveredEnv, ...]
    errors: Mapping[Path, str]

    def named(self, name: str) -> DiscoveredEnv:
        """The one environment of this name."""
        found = [env for env in self.environments if env.name == name]
        if not found:
            for path, reason in self.errors.items():
                if slug(path.stem) == slug(name):
                    raise NotFoundError(f"{path}: {reason}")
            names = [env.name for env in self.environments]
            if not extras.is_installed("environments"):
                raise MissingPackageError(extras.missing("environments", f"the environment {name!r}"))
            raise NotFoundError(f"there is no environment {name!r}.{did_you_mean(name, names)} See `palestra envs`")
        if len(found) > 1:
            files = " and ".join(str(env.file_path) for env in found)
            raise SettingError(f"{len(found)} environments are named {name!r}; give the file instead: {files}")
        return found[0]


def discover(paths: Iterable[Path | str] = ()) -> Discovery:
    """The built-in environments, those below `paths`, PALESTRA_ENV_PATH and ./environments, and installed ones."""
    folders = [LIBRARY, *configured_paths(paths)]
    sources = [read_source(path) for folder in folders for path in python_files(folder)]
    classes = _Classes(sources)
    found: list[DiscoveredEnv] = []
    for source in sources:
        origin: Origin = "built-in" if source.path.is_relative_to(LIBRARY) else "configured"
        if not source.path.name.startswith("_"):
            found += classes.environments(source, origin)
    errors = {source.path: source.error for source in sources if source.error}
    for source, class_name in _installed(errors):
        more = _Classes([*sources, source]).environments(source, "installed")
        found += [env for env in more if env.class_name == class_name]
    return Discovery(tuple(_one_for_each_task(found)), errors)


def in_file(path: Path) -> list[DiscoveredEnv]:
    """The environments of one file; its neighbours are read too, for the bases that it may have there."""
    source = read_source(path)
    if source.error:
        raise UserCodeError(f"{path}: {source.error}")
    neighbours = [read_source(p) for folder in (LIBRARY, path.parent) for p in python_files(folder) if p != path]
    return _Classes([source, *neighbours]).environments(source, "configured")


def package_of(path: Path) -> tuple[str, list[Path]]:
    """The package that the file's relative imports need ("": none), and folders to add to sys.path for its imports.

    Relative imports inside of `try` have a fallback. Absolute ones may begin with a folder that the file is in.
    """
    try:
        nodes = list(_imports_without_fallback(ast.parse(read_regular(path, MAX_BYTES))))
    except (OSError, PalestraError, SyntaxError, ValueError):
        return "", []  # running it says why
    parents = path.resolve().parents
    depth = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    first = {name.partition(".")[0] for name in names}
    roots = [folder.parent for folder in parents if folder.name in first]
    if not depth:
        return "", roots
    # a file of the folder's name would be found before the folder
    while depth < len(parents) - 1 and (
        (parents[depth] / "__init__.py").is_file() or (parents[0] / f"{parents[depth - 1].name}.py").is_file()
    ):
        depth += 1
    package = ".".join(folder.name for folder in reversed(parents[:depth]))
    return package, list(dict.fromkeys([parents[min(depth, len(parents) - 1)], *roots]))


def _imports_without_fallback(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.Try):
            yield from _imports_without_fallback(child)


def configured_paths(paths: Iterable[Path | str] = ()) -> list[Path]:
    variable = [part for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    candidates = [Path(path).resolve() for path in (*paths, *variable, "environments")]
    return list(dict.fromkeys(path for path in candidates if path.exists()))


def python_files(path: Path) -> Iterator[Path]:
    """The file itself, or all Python files below a folder; hidden folders and virtual environments are left out."""
    if path.is_file():
        yield path
        return
    count = 0
    for folder, names, files in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith((".", "__")) and n not in ("venv", "node_modules"))
        for name in sorted(files):
            if name.endswith(".py") and count < MAX_FILES:
                count += 1
                yield Path(folder, name)


@dataclass(frozen=True)
class ClassSource:
    """A class as written: its bases by their full dotted names where the imports show them."""

    name: str
    bases: tuple[str, ...]
    docstring: str
    constants: dict[str, str]  # class attributes that are plain texts or names, such as name = "gsm8k"


@dataclass(frozen=True)
class FileSource:
    """The classes of one file; `error` where it cannot be read or parsed."""

    path: Path
    classes: dict[str, ClassSource] = field(default_factory=dict)
    error: str | None = None
    imports: dict[str, str] = field(default_factory=dict)  # local name -> full dotted name


def module_names(path: Path) -> tuple[str, str]:
    """The names by which a file may be imported: its own, or its folder's."""
    return path.stem, path.parent.name


class _Classes:
    """The classes of many files, and which of them lead to an environment base.

    Files are never imported, so a base is looked up by its own name: in the same file, otherwise in all of them,
    unless it is imported from a module of another name.
    """

    def __init__(self, sources: Sequence[FileSource]) -> None:
        self._by_name: dict[str, list[tuple[FileSource, ClassSource]]] = {}
        self._sources = sources
        self._modules = {""} | {name for source in sources for name in module_names(source.path)}
        for source in sources:
            for cls in source.classes.values():
                self._by_name.setdefault(cls.name, []).append((source, cls))
        self._extended = {
            (home.path, parent.name)
            for source in sources
            for cls in source.classes.values()
            for base in cls.bases
            for home, parent in self._find(source, base)
        }

    def environments(self, source: FileSource, origin: Origin) -> list[DiscoveredEnv]:
        """The environments that a file defines. A class without a name that others extend is their base, no more."""
        found = []
        for cls in source.classes.values():
            dialect = self._dialect(source, cls, frozenset())
            is_base = "name" not in cls.constants and (source.path, cls.name) in self._extended
            if dialect and not cls.name.startswith("_") and not is_base:
                default = f"Environment from {source.path.name}"
                line = next((text.strip() for text in cls.docstring.splitlines() if text.strip()), default)
                name = cls.constants.get("name") or default_name(cls.name)
                config = cls.constants.get("env_config_cls")
                found.append(DiscoveredEnv(name, cls.name, source.path, line, origin, dialect, config))
        return found

    def _dialect(self, source: FileSource, cls: ClassSource, seen: frozenset[tuple[Path, str]]) -> str | None:
        if (source.path, cls.name) in seen:  # a circle
            return None
        for name in cls.bases:
            base = self._original(name)
            if base in BASES:
                return BASES[base]
            for home, parent in self._find(source, base):
                if dialect := self._dialect(home, parent, seen | {(source.path, cls.name)}):
                    return dialect
        return None

    def _original(self, base: str) -> str:
        """The full name of a base that another module re-exports: my_base.BaseEnv may be atroposlib's."""
        for _ in range(MAX_REEXPORTS):
            module, _dot, name = base.rpartition(".")
            if base in BASES or not module or not name.endswith("Env"):
                break
            found = [s.imports.get(name) for s in self._sources if module.rpartition(".")[2] in module_names(s.path)]
            if not any(found) and (path := _module_file(module)) is not None:
                found = [read_source(path).imports.get(name)]
            original = next((full for full in found if full and full != base), None)
            if original is None:
                break
            base = original
        return base

    def _find(self, source: FileSource, base: str) -> list[tuple[FileSource, ClassSource]]:
        """Where a base may be defined."""
        if base in source.classes:
            return [(source, source.classes[base])]
        module, _, name = base.rpartition(".")
        is_among_them = module.rpartition(".")[2] in self._modules  # and not of another library
        return self._by_name.get(name, []) if is_among_them else []


def read_source(path: Path) -> FileSource:
    """The classes of a file, without running it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return FileSource(path, error=f"is larger than {MAX_BYTES:,} bytes")
        tree = ast.parse(read_regular(path, MAX_BYTES), str(path))
    except SyntaxError as error:
        return FileSource(path, error=f"line {error.lineno}: {error.msg}")
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return FileSource(path, error=f"{type(error).__name__}: {error}")
    statements = list(_top_level(tree.body))
    imports = _imports(statements)
    classes = {node.name: _class(node, imports) for node in statements if isinstance(node, ast.ClassDef)}
    return FileSource(path, classes, imports=imports)


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, also those inside of `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def _imports(statements: Sequence[ast.stmt]) -> dict[str, str]:
    """Local name -> full dotted name of what was imported under it."""
    names: dict[str, str] = {}
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def _class(node: ast.ClassDef, imports: dict[str, str]) -> ClassSource:
    constants: dict[str, str] = {}
    for statement in node.body:
        value: ast.expr | None = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign):
            target, value = statement.target, statement.value
        if value is not None and isinstance(target, ast.Name):
            text = value.value if isinstance(value, ast.Constant) else _dotted(value)
            if isinstance(text, str):
                constants[target.id] = text
    bases = [_full_name(dotted, imports) for base in node.bases if (dotted := _dotted(base))]
    return ClassSource(node.name, tuple(bases), ast.get_docstring(node) or "", constants)


def _full_name(dotted: str, imports: dict[str, str]) -> str:
    """The name with its first part replaced by what was imported under it."""
    first, dot, rest = dotted.partition(".")
    return imports.get(first, first) + dot + rest


def _dotted(node: ast.expr) -> str | None:
    """`a.b.C` of an expression, also of `C[int]`; None when it is something else."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return None


def _installed(errors: dict[Path, str]) -> Iterator[tuple[FileSource, str]]:
    """The files and classes that installed packages announce, found without importing them."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        path = _module_file(entry.module)
        if path is None:
            errors[Path(entry.value)] = f"the installed environment {entry.name!r} has no source file"
            continue
        source = read_source(path)
        if source.error:
            errors[path] = source.error
        yield source, entry.attr


def _module_file(module: str) -> Path | None:
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        for tail in (Path(*rest).with_suffix(".py"), Path(*rest, "__init__.py")):
            if Path(folder, tail).is_file():
                return Path(folder, tail)
    return None


def _one_for_each_task(found: Iterable[DiscoveredEnv]) -> Iterator[DiscoveredEnv]:
    """The one environment that plays any dataset, as one for each dataset."""
    for env in found:
        if env.name == FAMILY and env.origin == "built-in":
            for task in extras.provided("reasoning-gym")():
                text = f"{task.replace('_', ' ').capitalize()}, from reasoning-gym."
                yield replace(env, name=f"{FAMILY}/{task}", description=text, preset={"task": task})
        else:
            yield env
