"""Keys and tokens of the environment: kept from programs that do not need them, and out of what others read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^TOKENIZERS_|_FILE$|_PATH$|SOCK$", re.IGNORECASE)
_PASS_VARIABLE = "PALESTRA_PASS_ENV"  # names, with commas between, that programs of others may see as well
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
    """What a program of others may see: harmless variables, those of `keep`, and those that PALESTRA_PASS_ENV names.

    >>> clean_environment(environ={"PATH": "/bin", "A_KEY": "x", "DATA": "y", "PALESTRA_PASS_ENV": "DATA"})
    {'PATH': '/bin', 'DATA': 'y', 'PALESTRA_PASS_ENV': 'DATA'}
    """
    kept = {*keep, *_passed_on(environ)}
    return {
        name: value
        for name, value in environ.items()
        if name in kept or (_HARMLESS.match(name) and not is_secret_name(name))
    }


def own_environment(hide: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process of our own may see: all but the token of our servers and `hide`, unless passed on by name."""
    hidden = {"PALESTRA_TOKEN", *hide} - _passed_on(environ)
    return {name: value for name, value in environ.items() if name not in hidden}


def _passed_on(environ: Mapping[str, str]) -> set[str]:
    return {name.strip() for name in environ.get(_PASS_VARIABLE, "").split(",")}


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` with every secret of the environment replaced by its variable's name."""
    for name, value in environ.items():
        if len(value) >= _MIN_LENGTH and is_secret_name(name) and value in text:
            text = text.replace(value, f"[{name}]")
    return text
