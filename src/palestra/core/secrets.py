"""Keys and tokens of the environment: kept from programs that do not need them, and out of what others read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^TOKENIZERS_|_FILE$|_PATH$|SOCK$", re.IGNORECASE)
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
    """The variables that a program of others may see: harmless ones, and those of `keep` that it was promised."""
    kept = set(keep)
    return {
        name: value
        for name, value in environ.items()
        if name in kept or (_HARMLESS.match(name) and not is_secret_name(name))
    }


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` with every secret of the environment replaced by its variable's name."""
    for name, value in environ.items():
        if len(value) >= _MIN_LENGTH and is_secret_name(name) and value in text:
            text = text.replace(value, f"[{name}]")
    return text
