"""Keys and tokens of the environment: kept from programs that do not need them, and out of what others read."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote, unquote

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^TOKENIZERS_|_FILE$|_PATH$|SOCK$", re.IGNORECASE)
_PASS_VARIABLE = "PALESTRA_PASS_ENV"  # names, with commas between, that third-party programs may see as well
_PASSWORD = re.compile(r"://[^\s/:@]*:([^\s@]+)@")
_PR_SET_DUMPABLE = 4
_MIN_LENGTH = 8  # a shorter one would blot out ordinary words

# What a program needs to find its libraries, caches and devices.
_HARMLESS = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|SHELL|TERM|COLUMNS|TMPDIR|TZ|LANG|LANGUAGE|LC_\w+|VIRTUAL_ENV|LD_LIBRARY_PATH|XDG_\w+"
    r"|PYTHON\w+|OMP_\w+|MKL_\w+|CUDA_\w+|NVIDIA_\w+|TRITON_\w+|TORCH_\w+|PYTORCH_\w+|HF_\w+|TRANSFORMERS_\w+"
    r"|TOKENIZERS_\w+|PALESTRA_\w+|NO_COLOR|\w+_PROXY|\w+_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE)$"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret.

    >>> [is_secret_name(n) for n in ("WANDB_API_KEY", "HF_TOKEN", "TOKENIZERS_PARALLELISM", "PATH")]
    [True, True, False, False]
    """
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def clean_environment(keep: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a third-party program may see: harmless variables, those of `keep`, and those that PALESTRA_PASS_ENV names.

    >>> clean_environment(environ={"PATH": "/bin", "A_KEY": "x", "DATA": "y", "PALESTRA_PASS_ENV": "DATA"})
    {'PATH': '/bin', 'DATA': 'y', 'PALESTRA_PASS_ENV': 'DATA'}
    """
    allowed = {*keep, *passed_on(environ)}
    return {
        name: value
        for name, value in environ.items()
        if name in allowed or (_HARMLESS.match(name) and not is_secret_name(name) and not _PASSWORD.search(value))
    }


def own_environment(hide: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process of our own may see: all but the token of our servers and `hide`, unless passed on by name."""
    hidden = {"PALESTRA_TOKEN", *hide} - passed_on(environ)
    return {name: value for name, value in environ.items() if name not in hidden}


def passed_on(environ: Mapping[str, str]) -> set[str]:
    """The names in PALESTRA_PASS_ENV."""
    return {name.strip() for name in environ.get(_PASS_VARIABLE, "").split(",")}


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` with every secret of the environment replaced by its variable's name, also where it is escaped.

    >>> redact("at db://me:open-sesame@host", {"DATABASE_URL": "db://me:open-sesame@host"})
    'at db://me:[DATABASE_URL]@host'
    """
    pattern, names = _secrets(tuple(environ.items()))
    return pattern.sub(lambda found: names[found[0]], text) if pattern else text


@lru_cache(4)
def _secrets(environ: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str] | None, dict[str, str]]:
    """One pattern of all that must not be shown, and what is shown instead. Long ones first: one may hold another."""
    shown: dict[str, str] = {}
    for name, value in environ:
        for password in _passwords(value):
            for form in _forms(password):
                shown.setdefault(f":{form}@", f":[{name}]@")
        whole = [value, *value.splitlines()] if is_secret_name(name) else _passwords(value)
        for secret in whole:
            if len(secret) >= _MIN_LENGTH:
                for form in _forms(secret):
                    shown.setdefault(form, f"[{name}]")
    ordered = sorted(shown, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None, shown


def _passwords(value: str) -> list[str]:
    """Those of the URLs in a value: `postgres://user:PASSWORD@host`."""
    return [password for found in _PASSWORD.findall(value) for password in (found, unquote(found))]


def _forms(secret: str) -> set[str]:
    """How a secret may be written: as it is, in JSON, in Python, in a URL."""
    in_json = (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    in_url = [quote(secret, safe, errors="surrogateescape") for safe in ("/", "")]
    return {secret, *in_json, *in_url, repr(secret)[1:-1]}


def hide_environment() -> None:
    """No other process of this user may read our environment or memory (Linux), if there is a secret in it."""
    if _secrets(tuple(os.environ.items()))[0]:
        hide_memory()


def hide_memory() -> None:
    """No other process of this user may read or change our memory (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
