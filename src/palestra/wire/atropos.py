"""Runs unmodified environments written for `atroposlib`, in a separate virtual environment."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.errors import PalestraError
from palestra.core.files import cache_folder, open_private, write_json, write_text
from palestra.core.secrets import clean_environment

# With transformers 5 this atroposlib never delivers a group: the result of apply_chat_template changed its type.
PACKAGES = ("atroposlib==0.4.0", "transformers==4.57.6")
# An environment may need torch; without an exact pin, pip takes the newest, with gigabytes of CUDA.
CONSTRAINTS = "torch==2.13.0\n"
_LAST_POSTS_S = 5.0
_STOP_S = 10.0
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def venv_folder(packages: Sequence[str] = ()) -> Path:
    """Where the Python with atroposlib and exactly these packages is, one for each version of this Python."""
    name = f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest()[:12]
    return cache_folder() / (f"{name}-{key}" if packages else name)


def ensure_python(folder: Path, packages: Sequence[str] = (), note: Callable[[str], None] = lambda text: None) -> Path:
    """The Python of a venv in `folder` that has atroposlib and `packages`; made when it is not there yet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, ready, requirements = folder / "bin" / "python", folder / "ready.json", [*PACKAGES, *sorted(packages)]
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or json.loads(ready.read_text()) != requirements:
            note(f"installing {', '.join(requirements)} into {folder}; this takes minutes, once")
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            write_text(folder / "constraints.txt", CONSTRAINTS)
            _run([str(python), "-m", "pip", "install", "-q", "-c", str(folder / "constraints.txt"), *requirements])
            write_json(ready, requirements)
    return python


def _run(command: Sequence[str]) -> None:
    environ = clean_environment(keep=[name for name in os.environ if name.startswith("PIP_")])
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise PalestraError(f"`{' '.join(command[:5])} …` failed:\n{last}")


def write_tokenizer(tokenizer: Any, folder: Path) -> Path:
    """The tokenizer in a form that older transformers read too: one JSON file and the names of its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    names = {name: str(token) for name in _SPECIAL if (token := getattr(tokenizer, name, None)) is not None}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": tokenizer.model_max_length,
        "chat_template": tokenizer.chat_template,
    }
    write_json(folder / "tokenizer_config.json", {**about, **names})
    return folder


def serve_command(python: Path, file: Path, env: Mapping[str, Any], openai: Mapping[str, Any]) -> list[str]:
    """`FILE serve` with settings in the form that atroposlib's command line takes."""
    command = children.isolated("--path", file.resolve().parent, file, "serve", python=python)
    for section, values in (("env", env), ("openai", openai)):
        for name, value in values.items():
            command += [f"--{section}.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return command


def process_command(python: Path, file: Path, config: Path) -> list[str]:
    """`FILE process`, with all its settings in a YAML file: a token on a command line is seen by others."""
    return children.isolated("--path", file.resolve().parent, file, "process", "--config", config, python=python)


class EnvProcess:
    """A running third-party environment; its output goes into a file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._ended_at: float | None = None
        with open_private(log) as file:
            self.process = children.start(command, env=env, stdout=file, stderr=file)

    def check(self) -> None:
        """Raise if it has ended; called while there is no batch, so its last posts have been taken by then."""
        code = self.process.poll()
        if code is None:
            return
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            children.end(self.process)
        if code or time.monotonic() - self._ended_at > _LAST_POSTS_S:
            last = "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-8:])
            text = f"the environment ended with status {code}; its log {self.log} ends with:\n{last}"
            hint = "" if code else "\nDoes its file call its class's cli() at the end?"
            raise PalestraError(text + hint)

    def stop(self) -> None:
        if self._ended_at is None:
            children.end(self.process, _STOP_S)


def env_process_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the environment sees: no key but that of the tracker in its settings."""
    use_wandb = str(settings.get("use_wandb", False)).lower() == "true"
    tracker = [name for name in os.environ if name.startswith("WANDB_") and use_wandb]
    return clean_environment(tracker) | {"PYTHONUNBUFFERED": "1"}
