"""Errors that a person can act on: what was wrong, what was got, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class PalestraError(Exception):
    """Bad input or a failed requirement; its text names the remedy. The command line prints it and exits with 2."""


class NotFiniteError(PalestraError):
    """A loss or gradient that is NaN or infinite; the weights are unchanged."""


class ContextLengthError(PalestraError):
    """A conversation that has no room for another token: in the context of `limit` tokens, or in a token budget."""

    def __init__(self, text: str, limit: int, tokens: int | None = None) -> None:
        super().__init__(text)
        self.limit = limit
        self.tokens = tokens  # of the prompt, where that is what is too long


class RolloutError(PalestraError):
    """A rollout that could not go on; recorded on the rollout, never fatal to a run."""


def text_of(error: BaseException) -> str:
    """An error in one line: our own explain themselves, others need their kind."""
    return str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


_PACKAGES = {  # module -> the package that has it, where the names differ
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "gitpython",
    "google": "google-genai",
    "jwt": "pyjwt",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def missing_package(text: str) -> str | None:
    """The package to install, if a text says that a module is missing.

    >>> missing_package("ModuleNotFoundError: No module named 'bs4.element'"), missing_package("KeyError: 'bs4'")
    ('beautifulsoup4', None)
    """
    found = re.search(r"No module named '([A-Za-z]\w*)", text)
    return _PACKAGES.get(found[1], found[1]) if found else None


def explain_arguments(meant: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown keyword is answered with the one of ours that it is `meant` as."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in signature(function).parameters if name != "self"]
        title = function.__qualname__

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            refuse_arguments(title, kwargs, known, meant)
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse_arguments(title: str, given: Iterable[str], known: Sequence[str], meant: Mapping[str, str]) -> None:
    """Raise for the first argument that is not known, with the one that it is `meant` as."""
    for name in given:
        if name not in known:
            word = meant.get(name, name)
            hint = did_you_mean(word, known if word == name else {word}.intersection(known))
            raise PalestraError(f"{title} has no argument {name!r}.{hint} It takes {', '.join(known)}")


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """An import inside that fails says what it is for, and what to install."""
    try:
        yield
    except ImportError as missing:
        raise PalestraError(f"{what} needs {missing.name}; pip install 'palestra[{extra}]'") from None


class UnsupportedModel(PalestraError):
    """A model that a fast path cannot compute, for a known reason; a slower path can."""
