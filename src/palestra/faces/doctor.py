"""What this machine can do: each finding with its remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from palestra.faces.rl_tools.requirements import MINIMUM_PYTHON, check_rl_python_version
from palestra.runs.manager import palestra_home

State = Literal["ok", "missing", "broken"]  # missing: something optional; broken: nothing works without it

KEYS = {
    "HF_TOKEN": "private models of the Hugging Face hub",
    "OPENAI_API_KEY": "models and judges at OpenAI, or at OPENAI_BASE_URL",
    "OPENROUTER_API_KEY": "rl_test_inference on models of OpenRouter",
    "TINKER_API_KEY": "training at Tinker",
    "WANDB_API_KEY": "metrics at Weights & Biases",
}
PORTS = {8000: "palestra serve", 8001: "palestra trajectory", 8002: "palestra mcp --http", 8003: "palestra http",
         9001: "palestra train --env-url"}  # fmt: skip
_ENOUGH_MEMORY_GIB = 2.0
_ENOUGH_DISK_GIB = 2.0
_EXTRA = re.compile(r"^(?P<package>[\w.-]+).*;\s*extra\s*==\s*[\"'](?P<extra>[\w-]+)[\"']")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was found, and what to do where it is not well."""

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything. Takes seconds: torch is asked for its GPUs."""
    return [*_python(), *_torch(), *_room(), *_extras(), *_keys(), *_ports(), *_sandbox()]


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    least = ".".join(map(str, MINIMUM_PYTHON))
    state: State = "ok" if check_rl_python_version() else "broken"
    yield Finding("Python", "version", state, found, "" if state == "ok" else f"install Python {least} or newer")


def _torch() -> Iterator[Finding]:
    """In a process of its own: a broken installation may take its importer down."""
    asked = (
        "import torch; c = torch.cuda; n = c.device_count(); "
        "print(torch.__version__); "
        "print('; '.join(f'{c.get_device_name(i)}, {c.get_device_properties(i).total_memory >> 30} GiB' "
        "for i in range(n)))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Finding("torch", "import", "broken", "importing it took longer than 120 s", "reinstall torch")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("torch", "import", "broken", last, "pip install --force-reinstall torch")
        return
    version, gpus = [*done.stdout.splitlines(), "", ""][:2]
    yield Finding("torch", "version", "ok", version)
    yield (
        Finding("torch", "GPU", "ok", gpus)
        if gpus
        else Finding(
            "torch",
            "GPU",
            "missing",
            "none that torch can use",
            "small models train on a CPU; for large ones use a machine with an NVIDIA GPU and torch built for CUDA",
        )
    )
    try:
        yield Finding("torch", "transformers", "ok", metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        yield Finding("torch", "transformers", "broken", "not installed", "pip install 'transformers>=5.17'")


def _room() -> Iterator[Finding]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    enough = memory >= _ENOUGH_MEMORY_GIB
    remedy = "" if enough else f"training needs about {_ENOUGH_MEMORY_GIB:g} GiB, even of the embedded model"
    yield Finding("room", "memory", "ok" if enough else "missing", f"{memory:.1f} GiB, {os.cpu_count()} cores", remedy)
    for name, path in {"disk here": Path.cwd(), "disk of the runs' index": palestra_home()}.items():
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(place).free / 2**30
        writable = os.access(place, os.W_OK)
        well = free >= _ENOUGH_DISK_GIB and writable
        told = f"{free:.1f} GiB free at {path}" + ("" if writable else ", which cannot be written")
        remedy = "" if well else "make room, or use another folder (PALESTRA_HOME moves the index)"
        yield Finding("room", name, "ok" if well else "missing", told, remedy)


def _extras() -> Iterator[Finding]:
    """What the package itself says can be added to it."""
    packages: dict[str, list[str]] = {}
    for line in metadata.requires("palestra") or ():
        if (match := _EXTRA.match(line)) and match["extra"] != "dev":
            packages.setdefault(match["extra"], []).append(match["package"])
    for extra, needed in sorted(packages.items()):
        missing = [package for package in needed if not _is_installed(package)]
        remedy = f"pip install 'palestra[{extra}]'" if missing else ""
        told = f"{', '.join(missing)} not installed" if missing else f"{', '.join(needed)} installed"
        yield Finding("extras", extra, "missing" if missing else "ok", told, remedy)


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _keys() -> Iterator[Finding]:
    """By name alone: no value is ever looked at further than whether it is there."""
    for name, use in KEYS.items():
        there = bool(os.environ.get(name))
        remedy = "" if there else f"export {name}=… if you want {use}"
        yield Finding("keys", name, "ok" if there else "missing", "set" if there else "not set", remedy)


def _ports() -> Iterator[Finding]:
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
        yield Finding("ports", "loopback", "ok", "ports can be opened on 127.0.0.1")
    except OSError as error:
        yield Finding(
            "ports", "loopback", "broken", f"no port can be opened: {error.strerror}", "allow it on 127.0.0.1"
        )
        return
    for port, user in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                yield Finding("ports", str(port), "ok", f"free for {user}")
            except OSError:
                yield Finding(
                    "ports", str(port), "missing", f"taken; {user} wants it", "choose another one with --port"
                )


def _sandbox() -> Iterator[Finding]:
    from palestra.envs.isolation import best_isolation

    kind = best_isolation()
    weak = kind == "limits"
    remedy = "install bubblewrap (bwrap), so that a model's code cannot read your files" if weak else ""
    yield Finding("sandbox", "isolation", "missing" if weak else "ok", kind, remedy)
