"""Runs unmodified environments written for `atroposlib`, in a separate virtual environment."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock

from palestra.core import children
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError, UserCodeError
from palestra.core.files import cache_folder, open_private, slug, write_json, write_text
from palestra.core.secrets import clean_environment
from palestra.envs.discover import find_env, package_of
from palestra.policy.openai import OpenAISettings
from palestra.runs.request import RunRequest

# With transformers 5 this atroposlib never delivers a group: the result of apply_chat_template changed its type.
PACKAGES = ("atroposlib==0.4.0", "transformers==4.57.6")
# An environment may need torch; without an exact pin, pip takes the newest, with gigabytes of CUDA.
CONSTRAINTS = "torch==2.13.0\n"
TRAINER_URL = "http://127.0.0.1:9001/v1"  # where a trainer serves its model, unless another port is set
_READY = "ready.json"  # in a venv: the list of its requirements, written when they are installed
_CHILD = Path(__file__).with_name("atropos_child.py")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def venv_folder(packages: Sequence[str] = ()) -> Path:
    """The venv that all environments share, or another one if `packages` contradict the pins installed there."""
    shared = cache_folder() / f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"
    pins = {name: pin for name, pin in map(_name_and_pin, _installed(shared)) if pin}
    if not any(pin and pins.get(name, pin) != pin for name, pin in map(_name_and_pin, packages)):
        return shared
    key = hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest()[:12]
    return shared.with_name(f"{shared.name}-{key}")


def _name_and_pin(requirement: str) -> tuple[str, str]:
    """Split a requirement.

    >>> _name_and_pin("Math_Verify[antlr4] ==0.7"), _name_and_pin("nltk")
    (('math-verify', '==0.7'), ('nltk', ''))
    """
    name = re.match(r"[\w.-]*", requirement.strip())[0]  # type: ignore[index]  # it matches anything
    pin = re.sub(r"^\[.*?\]", "", requirement.strip()[len(name) :].strip())
    return re.sub(r"[-_.]+", "-", name).lower(), pin.replace(" ", "")


def _installed(folder: Path) -> list[str]:
    """The requirements of a venv; none if there is no venv, or one of other versions of our own."""
    ready = folder / _READY
    installed = list(json.loads(ready.read_text())) if ready.is_file() else []
    return installed if installed[: len(PACKAGES)] == list(PACKAGES) else []


def requirements_of(file: Path) -> list[str]:
    """The packages that requirements.txt in the environment's folder lists; options of pip are left out."""
    listed = file.with_name("requirements.txt")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    return [text for line in lines if (text := line.partition("#")[0].strip())[:1].isalnum()]


def ensure_python(
    folder: Path,
    packages: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[str], None] = lambda text: None,  # called with each line of pip's output
) -> Path:
    """The Python of the venv in `folder`, which is made if it is missing, and extended by missing packages."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        installed = _installed(folder)
        missing = [package for package in dict.fromkeys([*PACKAGES, *packages]) if package not in installed]
        if missing:
            note(f"installing {', '.join(missing)} into {folder}, once; this can take minutes")
            if not installed:
                _run([sys.executable, "-m", "venv", "--clear", str(folder)], progress)
            write_text(folder / "constraints.txt", CONSTRAINTS)
            pip = [str(python), *"-m pip install --no-input --disable-pip-version-check -c".split()]
            constraints = str(folder / "constraints.txt")
            _run([*pip, constraints, *installed, *missing], progress)  # all of them, so that pip keeps earlier pins
            write_json(folder / _READY, [*installed, *missing])
    return python


def _run(command: Sequence[str], progress: Callable[[str], None]) -> None:
    environ = clean_environment(keep=[name for name in os.environ if name.startswith("PIP_")])
    lines: deque[str] = deque(maxlen=5)
    process = children.start(command, env=environ, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            progress(line.strip())
        code = process.wait()
    finally:
        children.end(process)
    if code:
        raise UserCodeError("\n".join([f"`{' '.join(command[:5])} …` failed:", *lines]))


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
    words = command(python, file, "serve")
    for section, values in (("env", env), ("openai", openai)):
        for name, value in values.items():
            words += [f"--{section}.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def command(python: Path, file: Path, *words: object) -> list[str]:
    """`FILE WORDS…` in the environment's own Python, as an isolated child."""
    package, roots = package_of(file)
    paths = os.pathsep.join(map(str, roots))
    return children.isolated("--path", file.resolve().parent, _CHILD, paths, package, file, *words, python=python)


def env_process_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of the environment's process: no key but that of the tracker in its settings."""
    use_wandb = str(settings.get("use_wandb", False)).lower() == "true"
    tracker = [name for name in os.environ if name.startswith("WANDB_") and use_wandb]
    return clean_environment(tracker) | {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class AtroposEnv:
    """An environment's file, its settings, those of its inference server, and what it needs installed."""

    file: Path
    env: Mapping[str, Any]
    openai: Mapping[str, Any]
    packages: Sequence[str] = ()

    @classmethod
    def of(cls, request: RunRequest) -> AtroposEnv:
        file = find_env(str(request.environment)).file_path
        return cls(file, request.env_settings, request.server_settings, request.packages)

    def python(self, note: Callable[[str], None] = print) -> Path:
        """The Python of its venv, which is made if it is missing."""
        return ensure_python(venv_folder(self.packages), self.packages, note)

    def serve(self, config: RunConfig, api_url: str) -> NoReturn:
        """Replace this process by the environment, which samples from the trainer's server and posts to the API."""
        tokenizer = cached_tokenizer(config.model.name)
        env = {
            "rollout_server_url": api_url,
            "tokenizer_name": tokenizer,
            "group_size": config.rollout.group_size,
            "total_steps": config.train.max_steps,
            "use_wandb": False,
        }
        server = {
            "model_name": tokenizer,
            "api_key": "none",
            "server_type": "sglang",  # gives token ids and logprobs, whatever the file names
            "base_url": TRAINER_URL,
            "health_check": False,  # it would ask the model every second
        }
        words = serve_command(self.python(), self.file, {**env, **self.env}, {**server, **self.openai})
        os.execve(words[0], words, env_process_environment(self.env))

    def process(self, config: RunConfig, groups: int, out: Path) -> NoReturn:
        """Replace this process by the environment, which attempts some problems with the model at openai.base_url."""
        import yaml

        if "base_url" not in self.openai:
            raise SettingError(
                f"{self.file.name} is written for atroposlib, and asks its model over HTTP; say where: "
                "--openai.base_url URL --openai.model_name NAME, for example of `palestra serve`"
            )
        openai, python = OpenAISettings.read(dict(self.openai)), self.python()
        env = {
            "tokenizer_name": str(cached_tokenizer(config.model.name)),
            "group_size": config.rollout.group_size,
            "use_wandb": False,
            **self.env,
            "total_steps": groups,
            "data_path_to_save_groups": str(out.resolve()),
        }
        server = {
            "model_name": openai.model_name,
            "base_url": openai.base_url,
            "api_key": os.environ.get(openai.api_key_env, "none"),
            "timeout": int(openai.timeout_s),
            "num_max_requests_at_once": openai.max_concurrent,
            "server_type": "openai",
            "health_check": False,  # it would ask the model every second
        }
        settings = out.with_suffix(".atropos.yaml")
        settings.unlink(missing_ok=True)
        with open_private(settings) as written:
            written.write(yaml.safe_dump({"env": env, "openai": server}).encode())
        # all its settings are in a file: a token on a command line is seen by others
        words = command(python, self.file, "process", "--config", settings.resolve())
        # environments that use managed_server need the tokens only to train
        os.execve(words[0], words, env_process_environment(env) | {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"})


def cached_tokenizer(model: str) -> Path:
    """The model's tokenizer, in a form and at a place that the environment's own Python reads."""
    from palestra.models.loading import load_tokenizer

    return write_tokenizer(load_tokenizer(model), cache_folder() / "tokenizers" / slug(model))
