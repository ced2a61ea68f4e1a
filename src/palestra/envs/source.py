"""What a Python file says about its classes, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palestra.core.files import read_regular

MAX_BYTES = 2_000_000  # a longer file is data, not an environment


@dataclass(frozen=True)
class ClassSource:
    """A class as written: its bases by their full dotted names where the imports show them."""

    name: str
    bases: tuple[str, ...]
    docstring: str
    constants: dict[str, str]  # class attributes that are plain texts or names, such as name = "gsm8k"


@dataclass(frozen=True)
class FileSource:
    """The classes of one file, and the modules of which it imports everything."""

    path: Path
    classes: dict[str, ClassSource] = field(default_factory=dict)
    star_imports: tuple[str, ...] = ()
    imports: dict[str, str] = field(default_factory=dict)
    error: str | None = None


def read_source(path: Path) -> FileSource:
    """Parse a file; one that cannot be read or parsed has `error` instead of classes."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return FileSource(path, error=f"is larger than {MAX_BYTES:,} bytes")
        tree = ast.parse(read_regular(path, MAX_BYTES), str(path))
    except SyntaxError as error:
        return FileSource(path, error=f"line {error.lineno}: {error.msg}")
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return FileSource(path, error=f"{type(error).__name__}: {error}")
    statements = list(_top_level(tree.body))
    imports, stars = _imports(statements, path)
    classes = {node.name: _class(node, imports) for node in statements if isinstance(node, ast.ClassDef)}
    return FileSource(path, classes, stars, imports)


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, also those inside of `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def _imports(statements: Sequence[ast.stmt], path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Local name -> what it stands for in full, and the modules imported with a star."""
    names: dict[str, str] = {}
    stars: list[str] = []
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, path)
            for alias in node.names:
                if alias.name == "*":
                    stars.append(module)
                else:
                    names[alias.asname or alias.name] = f"{module}.{alias.name}"
    return names, tuple(stars)


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    """A relative import by the names of the folders that it goes up to."""
    if not node.level:
        return node.module or ""
    folder = path.resolve().parents[min(node.level, len(path.resolve().parents)) - 1]
    return ".".join(part for part in (*folder.parts[1:], node.module) if part)


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
    bases = [full_name(dotted, imports) for base in node.bases if (dotted := _dotted(base))]
    return ClassSource(node.name, tuple(bases), ast.get_docstring(node) or "", constants)


def full_name(dotted: str, imports: dict[str, str]) -> str:
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
