"""Text and JSON from outside: of models, agents, judges, user code and files."""

from __future__ import annotations

import json
from typing import Any

MAX_JSON_DEPTH = 100  # Python's recursion limit ends writing and walking values that are nested much deeper


def encodable(value: Any, depth: int = MAX_JSON_DEPTH) -> Any:
    """A text or JSON value with a question mark for each lone surrogate, which no tokenizer, file or database takes.

    Values of other types, and those that are nested deeper than `depth`, are returned as they are.

    >>> encodable("half of an emoji: \\ud83d"), encodable({"a\\ud83d": ["\\ude00"]})
    ('half of an emoji: ?', {'a?': ['?']})
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict) and depth:
        return {encodable(key): encodable(item, depth - 1) for key, item in value.items()}
    if type(value) in (list, tuple) and depth:
        return type(value)(encodable(item, depth - 1) for item in value)
    return value


def as_text(value: Any) -> str:
    """An encodable text of any value; what has none is named by its type."""
    try:
        return str(encodable("" if value is None else str(value)))
    except Exception:
        return f"a {type(value).__name__}, which has no text form"


def shorten(text: str, max_chars: int) -> str:
    """The text, or its beginning with a line that says how much of it there was.

    >>> shorten("aaaabbbb", 4)
    'aaaa\\n[cut off: these are the first 4 of 8 characters]'
    """
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut off: these are the first {max_chars} of {len(text)} characters]"


def read_json(text: str) -> Any:
    """Parse JSON; raise ValueError for invalid JSON and for values nested deeper than MAX_JSON_DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and not is_shallow(value):
        raise ValueError("nested too deeply")
    return encodable(value)


def is_shallow(value: Any, depth: int = MAX_JSON_DEPTH) -> bool:
    """Check that a JSON value is nested at most `depth` levels deep."""
    children = list(value.values()) if isinstance(value, dict) else value
    return not isinstance(children, list | tuple) or (depth > 0 and all(is_shallow(c, depth - 1) for c in children))
