"""Limit concurrent runs by number, GPUs and memory; further runs are queued."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from palestra.core.config_sections import ModelSection
from palestra.core.errors import ResourceError, SettingError
from palestra.core.machine import processors

MAX_RUNS_VARIABLE = "PALESTRA_MAX_RUNS"
GPUS_VARIABLE = "PALESTRA_GPUS"  # the GPUs that runs may be given, as CUDA_VISIBLE_DEVICES names them
_PROCESS_GIB = 1.0  # Python with torch and a small model
_COPIES = 5  # weights, gradients, two moments of the optimizer, activations


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run needs."""

    gpus: int
    memory_gib: float


def fits(
    demand: Demand, running: Sequence[int], max_runs: int, machine_gpus: int, free_memory_gib: float
) -> str | None:
    """None if a run may start now, else what it waits for. A run that is alone on the machine always may.

    `running` has the GPUs that each running run has taken.

    >>> fits(Demand(0, 1.0), [0], max_runs=1, machine_gpus=0, free_memory_gib=8.0)
    '1 of at most 1 runs are running'
    """
    if not running:
        return None
    if len(running) >= max_runs:
        return f"{len(running)} of at most {max_runs} runs are running"
    if demand.gpus and sum(running) + demand.gpus > machine_gpus:
        return f"{sum(running)} of {machine_gpus} GPUs are in use"
    if demand.memory_gib > free_memory_gib:
        return f"it needs about {demand.memory_gib:.1f} GiB of memory, and {free_memory_gib:.1f} are free"
    return None


def demand_of(model: ModelSection, machine_gpus: int, processes: int, ranks: int = 1) -> Demand:
    """An estimate, from the settings alone, of what a run needs. More GPUs than the machine has are refused."""
    gpus = model.gpus or (ranks if model.device.startswith("cuda") or (model.device == "auto" and machine_gpus) else 0)
    require_gpus(model.gpus, machine_gpus)
    if ranks > 1 and gpus > machine_gpus:
        raise ResourceError(
            f"--nproc {ranks} needs a GPU for each process, and there are {machine_gpus}; "
            f"use --nproc {machine_gpus or 1}, or --model.device cpu"
        )
    folder = Path(model.name).expanduser()
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2**30 if folder.is_dir() else 0.0
    return Demand(gpus, (processes + ranks - 1) * _PROCESS_GIB + (0.0 if gpus else (_COPIES + ranks - 1) * weights))


def require_gpus(asked: int | None, available: int) -> None:
    """Refuse a run that could wait for ever."""
    if asked is not None and asked > available:
        raise SettingError(
            f"model.gpus = {asked}: there are {available} GPUs here; ask for at most {available}, or leave it out"
            if available
            else f"model.gpus = {asked}: there is no GPU here that a run may use; leave it out"
        )


def default_max_runs() -> int:
    """PALESTRA_MAX_RUNS, or the number of processors."""
    value = os.environ.get(MAX_RUNS_VARIABLE, "")
    return int(value) if value.isdecimal() and int(value) else processors()


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that may be used, as CUDA_VISIBLE_DEVICES names them, without loading torch."""
    present = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdecimal()])
    ours, visible = _names(GPUS_VARIABLE), _names("CUDA_VISIBLE_DEVICES")
    if ours is not None:
        return ours if visible is None else [name for name in visible if name in ours]
    return list(map(str, range(present))) if visible is None else visible[:present]


def _names(variable: str) -> list[str] | None:
    value = os.environ.get(variable)
    return None if value is None else [name for name in map(str.strip, value.split(",")) if name]


def count_gpus() -> int:
    return len(gpu_names())


def free_memory_gib() -> float:
    """What can be allocated without swapping."""
    return psutil.virtual_memory().available / 2**30
