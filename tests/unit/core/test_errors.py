"""Errors have classes with stable codes, and docs/errors.md lists all messages."""

import ast
import sys
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError, text_of

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import error_messages


def test_every_error_is_of_a_class_with_its_own_code():
    files = {file: ast.walk(ast.parse(file.read_text())) for file in error_messages.SOURCE.rglob("*.py")}
    calls = [(file.name, node.lineno) for file, nodes in files.items() for node in nodes if is_plain_error(node)]
    assert not calls, "raise a subclass of PalestraError, so that programs can tell the error apart"
    codes = [cls.code for cls in error_messages.classes().values() if cls.__bases__[0] in (PalestraError, Exception)]
    assert len(set(codes)) == len(codes)


def is_plain_error(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "PalestraError"


@pytest.mark.extras
def test_the_page_lists_every_message():
    assert error_messages.PAGE.read_text() == error_messages.page(), "python scripts/error_messages.py writes it"


class NoText(Exception):
    def __str__(self):
        raise SystemExit("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError(), "ValueError"),
        (PalestraError("a setting"), "a setting"),
        (NoText(), "NoText: (it has no text: making it raised SystemExit)"),
        (SystemExit(NoText()), "SystemExit: (it has no text: making it raised SystemExit)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_text(error, text):
    assert text_of(error) == text
    assert text_of(error, "a tool") == f"a tool raised {'' if text[0] != 'a' else 'PalestraError: '}{text}"
