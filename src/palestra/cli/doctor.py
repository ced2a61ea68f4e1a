"""`palestra doctor`: checks of this machine, each with a remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.text import Text

from palestra.cli.common import returns_data
from palestra.core.errors import PalestraError
from palestra.core.machine import installed_version, memory_gib, port_error
from palestra.runs.manager import palestra_home

State = Literal["ok", "missing", "broken"]  # missing: something optional; broken: nothing works without it

KEYS = {
    "HF_TOKEN": "private models of the Hugging Face hub",
    "OPENAI_API_KEY": "models and judges at OpenAI, or at OPENAI_BASE_URL",
    "OPENROUTER_API_KEY": "rl_test_inference on models of OpenRouter",
    "TINKER_API_KEY": "training at Tinker",
    "WANDB_API_KEY": "metrics at Weights & Biases",
}
PORTS = {8000: "palestra serve", 8001: "palestra trajectory", 8002: "palestra mcp --http",
         8004: "palestra dashboard", 8005: "palestra gateway", 8010: "palestra tinker",
         9001: "palestra train --env-url"}  # fmt: skip
_MARKS = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "broken": ("✗", "red")}
_ENOUGH_MEMORY_GIB = _ENOUGH_DISK_GIB = 2.0
_EXTRA = re.compile(r"^(?P<package>[\w.-]+).*;\s*extra\s*==\s*[\"'](?P<extra>[\w-]+)[\"']")


@dataclass(frozen=True)
class Check:
    """The result of one check, with a remedy if it is not ok."""

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""


@click.command("doctor")
@click.option("--model", "model_name", metavar="NAME", help="Check this model's chat template and tool calls instead.")
@returns_data
def command(model_name: str | None, console: Console) -> Iterator[dict[str, Any]]:
    """Check this machine: versions, GPU, memory, disk, extras, keys and ports, with remedies; for bug reports, too.

    With --model NAME, check a model instead: tool calls that its chat template writes must be read back.

    ✓ is there, · is optional and missing, ✗ is needed and broken. The exit status is 1 only for the last.
    """
    from palestra.train.progress import task

    with task(Console(stderr=True), f"examining {model_name or 'this machine'}"):
        checks = list(examine() if model_name is None else examine_model(model_name))
    broken = any(check.state == "broken" for check in checks)
    yield {"ok": not broken, "findings": [asdict(check) for check in checks]}
    for topic, members in groupby(checks, lambda check: check.topic):
        console.print(topic, style="bold")
        for check in members:
            mark, color = _MARKS[check.state]
            console.print(Text.assemble("  ", (mark, color), f" {check.name}: {check.found}"), soft_wrap=True)
            if check.remedy:
                console.print(Text(f"      → {check.remedy}"), soft_wrap=True)
    if broken:
        raise click.exceptions.Exit(1)


def examine() -> Iterator[Check]:
    """Run all checks. Takes seconds, since torch is asked for its GPUs."""
    yield Check("Python", "palestra", "ok", f"{metadata.version('palestra')} on {platform.platform()}")
    yield Check("Python", "version", "ok", f"{platform.python_version()} at {sys.executable}")
    yield from _torch()
    yield from _room()
    yield from _extras()
    for name, use in KEYS.items():  # whether they are set; the values are not read
        is_set = bool(os.environ.get(name))
        yield _check("keys", name, is_set, "set" if is_set else "not set", f"export {name}=… if you want {use}")
    if error := port_error(0):
        yield Check("ports", "loopback", "broken", f"no port can be opened: {error}", "allow it on 127.0.0.1")
    else:
        yield Check("ports", "loopback", "ok", "ports can be opened on 127.0.0.1")
        for port, user in PORTS.items():
            free = not port_error(port)
            state = f"free for {user}" if free else f"taken; {user} wants it"
            yield _check("ports", str(port), free, state, "choose another one with --port")
    from palestra.envs.sandbox.sandbox import choose_isolation

    try:
        yield Check("sandbox", "isolation", "ok", choose_isolation())
    except PalestraError as error:
        yield Check("sandbox", "isolation", "missing", "none", str(error))


def examine_model(name: str) -> Iterator[Check]:
    """Check that a model's chat template works, and that the tool calls it writes are read back."""
    from palestra.models.chat.template import ChatFormat
    from palestra.models.chat.written import check_tool_calls
    from palestra.models.loading import load_tokenizer

    part, about = "chat template", name
    try:
        chat = ChatFormat(load_tokenizer(name))
        yield Check("model", part, "ok", f"{name}; a turn ends with {' or '.join(chat.stop_texts)}")
        part, about = "tool calls", f"format {chat.call_format.name}"
        check_tool_calls(chat)
        yield Check("model", part, "ok", f"{about}, read back as written")
    except PalestraError as error:
        yield Check("model", part, "broken", about, str(error))


def _check(topic: str, name: str, ok: bool, found: str, remedy: str, otherwise: State = "missing") -> Check:
    return Check(topic, name, "ok", found) if ok else Check(topic, name, otherwise, found, remedy)


def _torch() -> Iterator[Check]:
    """Runs in a subprocess, since a broken installation may crash."""
    code = (
        "import torch; c = torch.cuda; n = c.device_count(); "
        "print(torch.__version__); "
        "print('; '.join(f'{c.get_device_name(i)}, {c.get_device_properties(i).total_memory >> 30} GiB' "
        "for i in range(n)))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Check("torch", "import", "broken", "importing it took longer than 120 s", "reinstall torch")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("torch", "import", "broken", last, "pip install --force-reinstall torch")
        return
    version, gpus = [*done.stdout.splitlines(), "", ""][:2]
    yield Check("torch", "version", "ok", version)
    remedy = "small models train on a CPU; for large ones use a machine with an NVIDIA GPU and torch built for CUDA"
    yield _check("torch", "GPU", bool(gpus), gpus or "none that torch can use", remedy)
    transformers = installed_version("transformers")
    remedy = "pip install 'transformers>=5.17'"
    yield _check("torch", "transformers", bool(transformers), transformers or "not installed", remedy, "broken")


def _room() -> Iterator[Check]:
    memory = memory_gib()
    remedy = f"training needs about {_ENOUGH_MEMORY_GIB:g} GiB, even of the embedded model"
    yield _check("room", "memory", memory >= _ENOUGH_MEMORY_GIB, f"{memory:.1f} GiB, {os.cpu_count()} cores", remedy)
    for name, path in {"disk here": Path.cwd(), "disk of the runs' index": palestra_home()}.items():
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(existing).free / 2**30
        writable = os.access(existing, os.W_OK)
        state = f"{free:.1f} GiB free at {path}" + ("" if writable else ", which cannot be written")
        remedy = "make room, or use another folder (PALESTRA_HOME moves the index)"
        yield _check("room", name, free >= _ENOUGH_DISK_GIB and writable, state, remedy)


def _extras() -> Iterator[Check]:
    packages: dict[str, list[str]] = {}
    for line in metadata.requires("palestra") or ():
        if (match := _EXTRA.match(line)) and match["extra"] != "dev":
            packages.setdefault(match["extra"], []).append(match["package"])
    for extra, needed in sorted(packages.items()):
        missing = [package for package in needed if not installed_version(package)]
        versions = ", ".join(f"{package} {installed_version(package)}" for package in needed)
        state = f"{', '.join(missing)} not installed" if missing else versions
        yield _check("extras", extra, not missing, state, f"pip install 'palestra[{extra}]'")
