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
    """Bad input or a failed requirement; its text names the remedy. The command line prints it and exits with 2.

    Each class has a stable `code`, by which programs can tell errors apart (docs/errors.md).
    """

    code = "error"


class SettingError(PalestraError):
    """A setting, an option or an argument that is unknown, out of range, or excluded by another one."""

    code = "invalid_setting"


class InputError(PalestraError):
    """An agent, a tool, a case, a message or another value that does not have the expected form."""

    code = "invalid_input"


class NotFoundError(PalestraError):
    """A file, model, environment, run or checkpoint that does not exist."""

    code = "not_found"


class UnreadableFileError(PalestraError):
    """A file that exists and cannot be used: corrupt, incomplete or in another format."""

    code = "unreadable_file"


class StorageError(PalestraError):
    """A file or folder that cannot be written."""

    code = "cannot_write"


class MissingPackageError(PalestraError):
    """A Python package or program that is not installed."""

    code = "missing_package"


class UnsupportedError(PalestraError):
    """A valid request that this model, backend, server or platform cannot fulfil."""

    code = "unsupported"


class ServiceError(PalestraError):
    """A server or another process that failed, or that cannot be reached."""

    code = "service_failed"


class ResourceError(PalestraError):
    """Too little memory or disk space, too few GPUs, or no free port."""

    code = "not_enough_resources"


class StateError(PalestraError):
    """A call that does not fit the current state, such as resuming a run that is complete."""

    code = "wrong_state"


class UserCodeError(PalestraError):
    """A function or file of the user that raised, or returned something else than expected."""

    code = "user_code_failed"


class NotAllowedError(PalestraError):
    """A request that the site's limits, a missing token or a missing permission forbid."""

    code = "not_allowed"


class TrainingError(PalestraError):
    """A step or an evaluation that failed; the text names the last good checkpoint."""

    code = "training_failed"


class NotFiniteError(PalestraError):
    """A loss or gradient that is NaN or infinite; the weights are unchanged."""

    code = "not_finite"


class ContextLengthError(PalestraError):
    """A conversation that has no room for another token: in the context of `limit` tokens, or in a token budget."""

    code = "context_length_exceeded"

    def __init__(self, text: str, limit: int, tokens: int | None = None) -> None:
        super().__init__(text)
        self.limit = limit
        self.tokens = tokens  # of the prompt, where that is what is too long


class RolloutError(PalestraError):
    """A rollout that could not continue; recorded on the rollout, never fatal to a run."""

    code = "rollout_failed"


class CallTimeout(Exception):
    """The called code took longer than its time limit."""


class UserCodeExit(Exception):
    """Stands for its cause, which user code raised and is no Exception, such as SystemExit or that of pytest.fail."""


def text_of(error: BaseException, where: str = "") -> str:
    """An error as text, even if its `str` raises; others than ours with their class. `where` says what raised it."""
    if isinstance(error, UserCodeExit):
        error = error.__cause__ or error
    try:
        text = str(error)
    except BaseException as failure:
        text = f"(it has no text: making it raised {type(failure).__name__})"
    if isinstance(error, PalestraError) and not where:
        return text
    if isinstance(error, CallTimeout):
        return f"{where} {text}".strip()
    return f"{where and where + ' raised '}{type(error).__name__}: {text}".removesuffix(": ")


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
            raise SettingError(f"{title} has no argument {name!r}.{hint} It takes {', '.join(known)}")


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """An import inside that fails says what it is for, and what to install."""
    try:
        yield
    except ImportError as missing:
        raise MissingPackageError(f"{what} needs {missing.name}; pip install 'palestra[{extra}]'") from None


class UnsupportedModel(UnsupportedError):
    """A model that a fast path cannot compute, for a known reason; a slower path can."""
