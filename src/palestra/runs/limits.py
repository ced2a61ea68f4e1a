"""How many runs a machine takes at once, by number, GPUs and memory. The others wait."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_RUNS_VARIABLE = "PALESTRA_MAX_RUNS"
_PROCESS_GIB = 1.0  # Python with torch and a small model
_COPIES = 5  # weights, gradients, two moments of the optimizer, activations


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run needs."""

    gpus: int
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Running:
    """What a running run has taken."""

    gpus: int


def fits(
    demand: Demand, running: Sequence[Running], max_runs: int, machine_gpus: int, free_memory_gib: float
) -> str | None:
    """None if a run may start now, else what it waits for. A run that is alone on the machine always may.

    >>> fits(Demand(0, 1.0), [Running(0)], max_runs=1, machine_gpus=0, free_memory_gib=8.0)
    '1 of at most 1 runs are running'
    """
    if not running:
        return None
    if len(running) >= max_runs:
        return f"{len(running)} of at most {max_runs} runs are running"
    gpus_in_use = sum(run.gpus for run in running)
    if demand.gpus and gpus_in_use + demand.gpus > machine_gpus:
        return f"{gpus_in_use} of {machine_gpus} GPUs are in use"
    if demand.memory_gib > free_memory_gib:
        return f"it needs about {demand.memory_gib:.1f} GiB of memory, and {free_memory_gib:.1f} are free"
    return None


def demand_of(settings: Mapping[str, Any], machine_gpus: int, processes: int) -> Demand:
    """An estimate, from the settings alone, of what a run needs."""
    device = str(settings.get("model.device", "auto"))
    gpus = 1 if device.startswith("cuda") or (device == "auto" and machine_gpus) else 0
    folder = Path(str(settings.get("model.name", ""))).expanduser()
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2**30 if folder.is_dir() else 0.0
    return Demand(gpus, processes * _PROCESS_GIB + (0.0 if gpus else _COPIES * weights))


def default_max_runs() -> int:
    """PALESTRA_MAX_RUNS, or the number of processors."""
    value = os.environ.get(MAX_RUNS_VARIABLE, "")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(value) if value.isdecimal() and int(value) else processors


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that may be used, as CUDA_VISIBLE_DEVICES names them, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdecimal()])
    names = map(str, range(present)) if visible is None else map(str.strip, visible.split(","))
    return [name for name in names if name][:present]


def count_gpus() -> int:
    return len(gpu_names())


def free_memory_gib() -> float:
    """What can be allocated without swapping; infinite if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    words = next(line.split() for line in lines if line.startswith("MemAvailable"))
    return int(words[1]) / 2**20
