"""Limit concurrent runs by number and by GPUs; further runs are queued.

Places are locks of files in PALESTRA_HOME, which the kernel releases when a run's supervisor and trainer have ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock

from palestra.core.config_sections import ModelSection
from palestra.core.errors import ResourceError, SettingError
from palestra.core.files import try_lock
from palestra.core.machine import processors

MAX_RUNS_VARIABLE = "PALESTRA_MAX_RUNS"
GPUS_VARIABLE = "PALESTRA_GPUS"  # the GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them


class Places:
    """The places of one run on this machine: in the queue, then among the running runs, with GPUs of its own."""

    def __init__(self, home: Path, run_id: str, launched: float, gpus: int) -> None:
        self._folder = home / "locks" / os.uname().nodename
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run_id, self._gpus = run_id, gpus
        self._ticket = f"waiting-{launched:017.6f}-{gpus}-{run_id}"  # sorts in the order of the queue
        self.locks: list[int] = []  # open files: of the ticket, then of the places
        self.devices: list[str] = []

    def take(self) -> str | None:
        """Take the run's places, or return what it waits for. A run that is alone always gets them."""
        devices, max_runs = gpu_names(), default_max_runs()
        with FileLock(self._folder / "queue.lock"):
            if not self.locks:
                self.lock(self._ticket)
            held = []  # the names that other runs have locked; the files of all others are removed
            for path in sorted(self._folder.glob("*-*")):
                if path.name == self._ticket:
                    continue
                if (lock := _lock(path)) is None:
                    held.append(path.name)
                else:
                    path.unlink()
                    os.close(lock)
            running = sum(name.startswith("run-") for name in held)
            if running >= max(1, max_runs):
                return f"{running} of at most {max_runs} runs are running"
            free = [device for device in devices if _file_name(f"gpu-{device}") not in held]
            if running and self._gpus > len(free):
                return f"{len(devices) - len(free)} of {len(devices)} GPUs are in use"
            for _, _, gpus, run_id in (name.split("-") for name in held if "waiting-" <= name < self._ticket):
                # Runs that need no GPU may pass those that wait for GPUs. Other runs may not: many small runs would
                # keep a large one waiting for ever.
                if self._gpus or gpus == "0":
                    return f"run {run_id} is before it"
            self.devices = free[: self._gpus]
            for name in (f"run-{self._run_id}", *(f"gpu-{device}" for device in self.devices)):
                self.lock(name)
            os.close(self.locks.pop(0))
        return None

    def lock(self, name: str) -> bool:
        """Lock a name on this machine until the run ends; False if another run has it."""
        number = _lock(self._folder / _file_name(name))
        self.locks += [] if number is None else [number]
        return number is not None


def _file_name(name: str) -> str:
    return name.replace("/", "_")  # of parts of GPUs: MIG-GPU-7f/1/0


def _lock(path: Path) -> int | None:
    """Lock a file until the number that is returned is closed; None if another process holds the lock."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if try_lock(number):
        return number
    os.close(number)
    return None


def gpus_needed(model: ModelSection, machine_gpus: int, ranks: int = 1) -> int:
    """How many GPUs a run needs, by its settings. More than the machine has are refused."""
    require_gpus(model.gpus, machine_gpus)
    gpus = model.gpus or (ranks if model.device.startswith("cuda") or (model.device == "auto" and machine_gpus) else 0)
    if ranks > 1 and gpus > machine_gpus:
        raise ResourceError(
            f"--nproc {ranks} needs a GPU for each process, and there are {machine_gpus}; "
            f"use --nproc {machine_gpus or 1}, or --model.device cpu"
        )
    return gpus


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
