"""Answers of the tools: always a JSON object, also for an error."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from palestra.core.errors import InputError, PalestraError
from palestra.core.secrets import redact
from palestra.core.text import encodable

MAX_ARGUMENT_CHARS = 100_000
MAX_LISTED = 200
MAX_CHOICES = 12  # that an error names
log = logging.getLogger("palestra")

Answer = dict[str, Any]


class Refusal(InputError):
    """An error with additional data, such as the available choices or the locked value."""

    def __init__(self, text: str, **more: Any) -> None:
        super().__init__(text)
        self.more = more


def answer(make: Callable[[], Mapping[str, Any]]) -> Answer:
    """Return the result of `make` as JSON without secrets, or an answer with `error` if it raises."""
    try:
        return _without_secrets(make())
    except PalestraError as error:
        return _without_secrets({"error": str(error), "code": error.code, **getattr(error, "more", {})})
    except Exception as error:  # a tool never takes its server down
        log.exception("a tool failed")
        text = f"this is a fault of Palestra: {type(error).__name__}: {short(error)}. "
        text += "`palestra doctor` shows what this machine lacks; please report it with the server's log"
        return _without_secrets({"error": text, "code": "internal_error"})


def _without_secrets(made: Mapping[str, Any]) -> Answer:
    return dict(json.loads(redact(json.dumps(to_json(made)))))


def to_json(value: Any) -> Any:
    """A value as JSON: no NaN, no lone surrogates, and texts of what is no JSON."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return json.loads(encodable(text), parse_constant=lambda name: None)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, Set) else str(value)


def require_json(arguments: Any) -> dict[str, Any]:
    """Check the arguments of a call; Refusal if they are not JSON, too long, or hold a secret."""
    if not isinstance(arguments, Mapping):
        raise Refusal(f"the arguments are a {type(arguments).__name__}; expected an object with a name for each")
    try:
        text = json.dumps(dict(arguments), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refusal(f"the arguments are not JSON ({short(error)}); give text, numbers, lists and objects") from None
    if len(text) > MAX_ARGUMENT_CHARS:
        raise Refusal(f"the arguments hold {len(text)} characters; expected at most {MAX_ARGUMENT_CHARS}")
    if redact(text) != text:
        raise Refusal(
            "the arguments hold a secret of this program's environment; settings are written to disk: leave it"
        )
    return dict(arguments)


def closest(word: str, known: Iterable[str]) -> list[str]:
    """The names that are most like a word; all of them would fill an agent's context."""
    return difflib.get_close_matches(word[:200], list(known), n=MAX_CHOICES, cutoff=0.0)


def require_page(limit: int, offset: int) -> None:
    if not (1 <= limit <= MAX_LISTED and offset >= 0):
        raise Refusal(f"limit={short(limit)}, offset={short(offset)}; expected 1 to {MAX_LISTED}, and 0 or more")


def page(
    rows: Sequence[Any], limit: int, offset: int, name: Callable[[Any], str], contains: str
) -> tuple[list[Any], dict[str, int]]:
    """Some of the rows whose name contains a text; their count, and next_offset unless this is the last page."""
    require_page(limit, offset)
    matching = [row for row in rows if contains.lower() in name(row).lower()]
    following = offset + limit
    more = {"next_offset": following} if following < len(matching) else {}
    return matching[offset:following], {"count": len(matching), **more}


def short(value: Any, length: int = 120) -> str:
    """A value as text that fits into an error."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"
