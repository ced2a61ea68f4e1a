"""Write docs/errors.md: the codes of errors, and every message of the source by its code.

python scripts/error_messages.py [--check]

The page is also the snapshot of all messages: tests assert error classes, and a changed wording shows up there.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from palestra.core import errors
from palestra.core.errors import PalestraError

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "palestra"
PAGE = ROOT / "docs" / "errors.md"
HEAD = """# Errors

Palestra raises a `PalestraError` for everything that you can correct. Its text says what is wrong and how to fix it.
Its class has a `code` that stays the same when a text changes:

```python
from palestra import EvalSuite, PalestraError

try:
    EvalSuite.from_records([])
except PalestraError as error:
    print(error.code)  # invalid_input
```

The command line prints the text and exits with 2; `--debug` adds the traceback.
The HTTP servers send the code as `error.code`, and the `rl_*` tools as `code` next to `error`.

| code | class in `palestra.core.errors` | meaning |
| --- | --- | --- |
"""


def classes() -> dict[str, type[PalestraError]]:
    """Every error class of `core/errors.py` by its name."""
    found = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PalestraError)]
    return {cls.__name__: cls for cls in found}


def messages() -> dict[str, list[str]]:
    """The texts of all errors in the source, by the name of their class; values are written as `…`."""
    found: dict[str, list[str]] = {name: [] for name in classes()}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found and node.args:
                text = _text(node.args[0])
                if text.strip(" …:;.\n"):
                    found[node.func.id].append(" ".join(text.split()))
    return {name: sorted(set(texts)) for name, texts in found.items()}


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
        case _:
            return "…"


def page() -> str:
    """The whole page."""
    found = messages()
    rows = [f"| `{cls.code}` | `{name}` | {_meaning(cls)} |" for name, cls in classes().items()]
    parts = [HEAD + "\n".join(rows), "", "## All messages", "", "`…` stands for a value."]
    for name, cls in classes().items():
        if found[name]:
            parts += ["", f"### {cls.code}" if cls is not PalestraError else "### Other errors", ""]
            parts += [f"- {text}" for text in found[name]]
    return "\n".join(parts) + "\n"


def _meaning(cls: type[PalestraError]) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    if parser.parse_args().check:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
