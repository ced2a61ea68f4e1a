"""Environments by name or file: listed by parsing source files, without running any; then loaded, ready to run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from palestra.core import extras
from palestra.core.config import explain, without_removed
from palestra.core.errors import (
    InputError,
    MissingPackageError,
    NotFoundError,
    PalestraError,
    SettingError,
    UnsupportedError,
    UserCodeError,
    did_you_mean,
    text_of,
)
from palestra.core.files import import_file, read_regular, slug
from palestra.envs.env import Env, default_name
from palestra.envs.running import RunningEnv

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
        matches = [env for env in self.environments if env.name == name]
        if not matches:
            for path, reason in self.errors.items():
                if slug(path.stem) == slug(name):
                    raise NotFoundError(f"{path}: {reason}")
            names = [env.name for env in self.environments]
            if not extras.is_installed("environments"):
                raise MissingPackageError(extras.missing("environments", f"the environment {name!r}"))
            raise NotFoundError(f"there is no environment {name!r}.{did_you_mean(name, names)} See `palestra envs`")
        if len(matches) > 1:
            files = " and ".join(str(env.file_path) for env in matches)
            raise SettingError(f"{len(matches)} environments are named {name!r}; give the file instead: {files}")
        return matches[0]


def discover(paths: Iterable[Path | str] = ()) -> Discovery:
    """The built-in environments, those below `paths`, PALESTRA_ENV_PATH and ./environments, and installed ones."""
    files = _Files()
    variable = [part for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    roots = dict.fromkeys(Path(path).resolve() for path in (*paths, *variable, "environments"))
    folders = [LIBRARY, *(root for root in roots if root.exists())]
    sources = [files.read(path) for folder in folders for path in python_files(folder)]
    extended = files.extended(sources)
    environments: list[DiscoveredEnv] = []
    for source in sources:
        origin: Origin = "built-in" if source.path.is_relative_to(LIBRARY) else "configured"
        if not source.path.name.startswith("_"):
            environments += files.environments(source, origin, extended)
    errors = {source.path: source.error for source in sources if source.error}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        path = _module_file(entry.module)
        if path is None:
            errors[Path(entry.value)] = f"the installed environment {entry.name!r} has no source file"
            continue
        source = files.read(path)
        if source.error:
            errors[path] = source.error
        environments += [e for e in files.environments(source, "installed", set()) if e.class_name == entry.attr]
    listed = []
    for env in environments:
        if env.name != FAMILY or env.origin != "built-in":
            listed.append(env)
            continue
        for task in extras.provided("reasoning-gym")():  # the one that plays any dataset, as one for each dataset
            text = f"{task.replace('_', ' ').capitalize()}, from reasoning-gym."
            listed.append(replace(env, name=f"{FAMILY}/{task}", description=text, preset={"task": task}))
    return Discovery(tuple(listed), errors)


def in_file(path: Path) -> list[DiscoveredEnv]:
    """The environments of one file; of others, only those are read from which it imports the bases of its classes."""
    files = _Files()
    source = files.read(path)
    if source.error:
        raise UserCodeError(f"{path}: {source.error}")
    return files.environments(source, "configured", files.extended([source]))


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
class FileSource:
    """The classes of one file, and what its names mean; `error` where it cannot be read or parsed."""

    path: Path
    classes: Mapping[str, ast.ClassDef] = field(default_factory=dict)
    error: str | None = None
    imports: Mapping[str, str] = field(default_factory=dict)  # local name -> full dotted name
    stars: Sequence[str] = ()  # modules of which all names are imported

    def bases(self, cls: ast.ClassDef) -> Iterator[str]:
        """The bases of a class, by their full dotted names where the imports show them."""
        for dotted in filter(None, map(_dotted, cls.bases)):
            first, dot, rest = dotted.partition(".")
            yield self.imports.get(first, first) + dot + rest


class _Files:
    """Parsed files. Bases of classes are followed from file to file by their imports; nothing is run."""

    def __init__(self) -> None:
        self.read = cache(read_source)

    def extended(self, sources: Iterable[FileSource]) -> set[tuple[Path, str]]:
        """The classes that classes of these files extend."""
        classes = (
            (source, base) for source in sources for cls in source.classes.values() for base in source.bases(cls)
        )
        parents = (self._follow(source, base) for source, base in classes)
        return {(parent[0].path, parent[1].name) for parent in parents if isinstance(parent, tuple)}

    def environments(
        self, source: FileSource, origin: Origin, extended: Container[tuple[Path, str]]
    ) -> list[DiscoveredEnv]:
        """The environments that a file defines. A class without a name that others extend is their base, no more."""
        environments = []
        for cls in source.classes.values():
            constants = _constants(cls)
            is_base = "name" not in constants and (source.path, cls.name) in extended
            dialect = None if cls.name.startswith("_") or is_base else self._dialect(source, cls, frozenset())
            if dialect:
                default = f"Environment from {source.path.name}"
                line = (ast.get_docstring(cls) or default).splitlines()[0].strip()
                name, config = constants.get("name") or default_name(cls.name), constants.get("env_config_cls")
                environments.append(DiscoveredEnv(name, cls.name, source.path, line, origin, dialect, config))
        return environments

    def _dialect(self, source: FileSource, cls: ast.ClassDef, seen: frozenset[tuple[Path, str]]) -> str | None:
        if (source.path, cls.name) in seen:  # a circle
            return None
        for base in source.bases(cls):
            parent = self._follow(source, base)
            if isinstance(parent, tuple):
                parent = self._dialect(*parent, seen | {(source.path, cls.name)})
            if parent is not None:
                return parent
        return None

    def _follow(
        self, source: FileSource, name: str, reexports: int = MAX_REEXPORTS
    ) -> str | tuple[FileSource, ast.ClassDef] | None:
        """The dialect of a base by its full name, or its file and class; None where there is no such source."""
        if name in BASES:
            return BASES[name]
        if name in source.classes:
            return source, source.classes[name]
        module, dot, attr = name.rpartition(".")
        if reexports == 0:
            return None
        if not dot:
            parents = (self._follow(source, f"{star}.{name}", reexports - 1) for star in source.stars)
            return next((parent for parent in parents if parent), None)
        module += "" if module.strip(".") else "."  # `from . import Base`
        file, relative = source.path, module.lstrip(".")
        if level := len(module) - len(relative):
            path = _file_below(file.parents[min(level, len(file.parents)) - 1], relative)
        else:  # from its own folders, or of Palestra
            top = module.partition(".")[0]
            folders = [file.parent, *(folder.parent for folder in file.parents if folder.name == top)]
            path = next((own for folder in folders if (own := _file_below(folder, module))), None)
            path = _module_file(module) if path is None and top == "palestra" else path
        if path is None and attr.endswith("Env"):
            path = _module_file(module)  # other libraries are read for names of environments alone
        if path is None:
            return None
        other = self.read(path)
        return self._follow(other, other.imports.get(attr, attr), reexports - 1)


def _file_below(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*filter(None, module.split(".")))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


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
    imports: dict[str, str] = {}
    stars = []
    statements = list(_top_level(tree.body))
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                imports[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            dot = "" if module.endswith(".") else "."
            imports |= {alias.asname or alias.name: f"{module}{dot}{alias.name}" for alias in node.names}
            stars += [module for alias in node.names if alias.name == "*"]
    classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
    return FileSource(path, classes, imports=imports, stars=stars)


def _constants(cls: ast.ClassDef) -> dict[str, str]:
    """Class attributes that are plain texts or names, such as name = "gsm8k"."""
    constants: dict[str, str] = {}
    for statement in cls.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            value = statement.value
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            text = value.value if isinstance(value, ast.Constant) else value and _dotted(value)
            if len(targets) == 1 and isinstance(targets[0], ast.Name) and isinstance(text, str):
                constants[targets[0].id] = text
    return constants


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, also those inside of `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


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


def _module_file(module: str) -> Path | None:
    """The source file of an installed module, determined without importing it."""
    top, _, rest = module.partition(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not rest:
        return Path(spec.origin) if spec and spec.origin else None
    paths = (_file_below(Path(folder), rest) for folder in spec.submodule_search_locations or ())
    return next(filter(None, paths), None)


LIBRARIES = ("gymnasium", "openenv", "verifiers")  # whose environments have names such as gymnasium:ID
_WANTED = "An environment file defines a subclass of palestra.Env"


def find_env(name_or_file: str) -> DiscoveredEnv:
    """`calculator`, `my_env.py`, `my_env.py:Class` where a file has several, or `gymnasium:ID` of another library."""
    file, _, class_name = name_or_file.partition(":")
    if file in LIBRARIES and class_name:
        cls = _named(file)
        about = (cls.__doc__ or "").strip().splitlines()[0]
        path = Path(inspect.getfile(cls))
        return DiscoveredEnv(name_or_file, cls.__name__, path, about, "built-in", preset={"target": class_name})
    if not file.endswith(".py"):
        return discover().named(name_or_file)
    path = Path(file).resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise NotFoundError(f"there is no environment file {file}.{near}")
    entries = [env for env in in_file(path) if class_name in ("", env.class_name)]
    if not entries:
        raise InputError(f"{file} defines no environment{class_name and f' {class_name}'}. {_WANTED}")
    if len(entries) > 1:
        choices = ", ".join(f"{file}:{env.class_name}" for env in entries)
        raise SettingError(f"{file} defines several environments; name one: {choices}")
    return entries[0]


def load_env(name_or_file: str, settings: Mapping[str, Any] | None = None) -> RunningEnv:
    """Find, import, configure and set up an environment. `settings` are fields of its config, as text or values."""
    entry = find_env(name_or_file)
    cls = env_class(entry)
    config = configure(cls, {**entry.preset, **(settings or {})})
    return RunningEnv(cls(config))


def env_class(entry: DiscoveredEnv) -> type[Env]:
    """Import the class. Built-in ones are modules of Palestra, all others are separate files."""
    if entry.dialect != "palestra":
        raise UnsupportedError(
            f"{entry.file_path} is written for {entry.dialect}; run it as a separate service: "
            f"palestra env run-{entry.dialect} {entry.file_path}"
        )
    if entry.name.partition(":")[0] in LIBRARIES:
        return _named(entry.name.partition(":")[0])
    if entry.file_path.is_relative_to(LIBRARY):
        module = extras.load(f"environments.{entry.file_path.stem}", entry.name)
    else:
        module = import_file(entry.file_path, str(entry.file_path), _WANTED)
    cls = getattr(module, entry.class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, Env):
        raise UserCodeError(f"{entry.file_path}: {entry.class_name} is not a subclass of palestra.Env when it runs")
    return cls


def _named(library: str) -> type[Env]:
    """The environment that makes those of another library by name."""
    return extras.provided("environments of other libraries")[library]


def configure(cls: type[Env], settings: Mapping[str, Any]) -> Any:
    """The environment's own config with single fields changed; an error for a wrong name or value lists the fields."""
    try:
        config = cls.config_init()
    except Exception as error:
        raise UserCodeError(f"{cls.__name__}.config_init raised {text_of(error)}") from error
    if not isinstance(config, BaseModel):
        kind = type(config).__name__
        raise UserCodeError(f"{cls.__name__}.config_init returned a {kind}; expected a pydantic model")
    fields = list(type(config).model_fields)
    unknown = {f"env.{name}": value for name, value in settings.items() if name not in fields}
    for key in without_removed(unknown, cls.__name__):
        name = key.removeprefix("env.")
        raise SettingError(
            f"unknown setting {key!r}.{did_you_mean(name, fields)} This environment has: {', '.join(fields)}"
        )
    settings = {name: value for name, value in settings.items() if name in fields}
    values = config.model_dump()
    for name, value in settings.items():
        values[name] = value
        if isinstance(value, str) and value[:1] in ("[", "{"):  # lists and objects come from the command line as JSON
            with contextlib.suppress(ValueError):
                values[name] = json.loads(value)
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        raise SettingError(explain(error, fields)) from None
