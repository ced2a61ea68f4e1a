"""Text and JSON from outside: of models, agents, judges, user code and files; values for terminals and logs."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
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
        return type(value)(map(encodable, value, itertools.repeat(depth - 1)))
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
    if not isinstance(children, list | tuple):
        return True
    return depth > 0 and all(map(is_shallow, children, itertools.repeat(depth - 1)))


# all but tab and newline; also those that reverse the direction of writing, and lone surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(shares: list[float], width: int) -> str:
    """Numbers in 0..1 as a line of bars; neighbours are averaged until they fit.

    >>> sparkline([0.0, 0.5, 1.0], width=10)
    '▁▅█'
    """
    count = min(width, len(shares))
    edges = [round(i * len(shares) / count) for i in range(count + 1)]
    means = [sum(shares[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[min(int(m * len(_BARS)), len(_BARS) - 1)] for m in means)


def show_seconds(seconds: float) -> str:
    """42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def show_size(count: float) -> str:
    """
    >>> show_size(900), show_size(5_000_000), show_size(3 * 2**30)
    ('1 kB', '5 MB', '3.2 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if unit == "GB" else f"{count / size:.0f} {unit}"
    return f"{count / 1e3:.0f} kB"


def visible(text: str) -> str:
    """Text of a model, a tool or a log for the terminal: escape sequences and control characters are shown, not obeyed.

    >>> visible("a\\x1b[31mred\\x07")
    'a\\\\x1b[31mred\\\\x07'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show_path(path: Path) -> str:
    """Relative to the working directory if the path is below it, so that it can be copied from the screen."""
    try:
        return visible(str(path.resolve().relative_to(Path.cwd())))
    except (ValueError, FileNotFoundError):  # the second: the working directory was deleted
        return visible(os.path.realpath(path) if path.is_absolute() else str(path))
