"""Checkpoints: whole or not at all.

`core/files.py` writes them, so that a crash or a full disk leaves the previous one whole.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from palestra.core.errors import PalestraError, StateError, StorageError, UnreadableFileError
from palestra.core.files import free_bytes, partial_folder, verify_folder, write_folder
from palestra.core.ranks import ONE_PROCESS, RankFailed, Ranks
from palestra.core.run_folder import MANIFEST, STATE, RunFolder, last_checkpoint, step_checkpoints, step_folder, step_of  # noqa: F401
from palestra.runs.index import refuse_busy
from palestra.train.safety_net import UNTOUCHED, SafetyState

FORMAT = 2


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where the loop stands: all that is not weights, optimizer or generators."""

    step: int = 0
    source: dict[str, Any] = field(default_factory=dict)  # what the source of groups needs to go on exactly
    policy_version: int = 0
    entropy_coefficient: float | None = None  # None: as the config says
    signal_rate: float = 1.0  # the share of the last step's groups whose rewards differed
    best_reward: float = float("-inf")
    best_step: int = 0
    safety: SafetyState = UNTOUCHED
    stage: int = 0  # of the plan's stages, counted from 0
    stage_start: int = 0  # the steps before that stage
    sampled_tokens: int = 0  # by all steps so far
    cases: dict[str, list[float]] = field(default_factory=dict)  # the pass rates of train.sampling = learnable

    @property
    def stage_steps(self) -> int:
        """Steps that its stage has taken."""
        return self.step - self.stage_start

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TrainState:
        """Read a state; older versions wrote other fields, too, or had no `safety`."""
        safety = SafetyState.from_dict(record["safety"]) if "safety" in record else UNTOUCHED
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        return cls(**known | {"safety": safety})


def save_checkpoint(folder: Path, state: TrainState, write: Callable[[Path], None], ranks: Ranks = ONE_PROCESS) -> Path:
    """Write a checkpoint atomically, with all ranks: each one's `write` puts its files into the path that it gets."""

    def write_all(aside: Path) -> None:
        write(aside)
        (aside / STATE).write_text(json.dumps({"format": FORMAT, **asdict(state)}))

    failure, reason, aside = None, None, partial_folder(folder)
    try:  # the folders are made before ranks wait for each other; not a run folder that was deleted
        for path in (folder.parent, aside):
            ranks.from_first(partial(path.mkdir, exist_ok=True))
        if ranks.is_first:
            write_folder(folder, write_all)
        else:
            write(aside)
    except (OSError, RuntimeError, SafetensorError, RankFailed) as error:  # a full disk is each, by who was writing
        system = error.__context__ if isinstance(error.__context__, OSError) else error  # torch raises its own then
        failure, reason = error, getattr(system, "strerror", None) or str(error)
    if reasons := [text for text in ranks.gather(reason, str | None) if text is not None]:
        raise StorageError(
            f"the checkpoint {folder} could not be written ({reasons[0]}); earlier checkpoints are whole. Free some "
            "space, or make the folder writable"
        ) from failure
    return folder


def has_room(folder: Path, step: int, least: int, warn: Callable[[str], None]) -> bool:
    """Whether `least` bytes, of a checkpoint and the final model, are free on the disk; warns if not."""
    free = free_bytes(folder)
    if free < least:
        warn(
            f"no checkpoint of step {step}: {free / 2**20:,.0f} MiB are free, and a checkpoint and the final model "
            f"need {least / 2**20:,.0f} MiB; free some space"
        )
    return free >= least


def read_checkpoint(folder: Path) -> TrainState:
    """Check every file against the manifest and give the loop's state."""
    verify_folder(folder)
    try:
        state = json.loads((folder / STATE).read_text())
        version = state.pop("format", 1)
        if version > FORMAT:
            raise UnreadableFileError(
                f"the checkpoint {folder} has format {version}, this version of Palestra reads up to {FORMAT}; "
                "resume with the version that wrote it"
            )
        if version == 1:
            import torch

            learner = torch.load(folder / "learner.pt", map_location="cpu", weights_only=True)
            state |= {"source": {"cursor": state.pop("cursor")}, "entropy_coefficient": learner["entropy_coefficient"]}
        return TrainState.from_dict(state)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableFileError(f"the checkpoint file {folder / STATE} is corrupt ({type(error).__name__})") from None


def choose_checkpoint(run: RunFolder, name: str | None, note: Callable[[str], None]) -> tuple[Path, TrainState] | None:
    """The checkpoint of this name; without one the newest that is whole. None where the run has none at all.

    Raises while another process trains the run: its records are cut back to the checkpoint.
    """
    refuse_busy(run.path)
    damaged: PalestraError | None = None
    for path in reversed(run.step_checkpoints()) if name is None else [run.checkpoint(name)]:
        try:
            state = read_checkpoint(path)
        except PalestraError as error:
            damaged = damaged or error
            continue
        if damaged is not None:
            note(f"{damaged}; going on from {path.name}, the newest that is whole")
        return path, state
    if damaged is not None:
        others = "choose another with --from-checkpoint" if name else "no other is whole, so start a new run"
        raise UnreadableFileError(f"{damaged}; {others}")
    # without a report, a run that writes checkpoints was killed between its model and its first checkpoint
    if run.model.is_dir() and (run.report() is not None or not run.config.checkpoint.every):
        raise StateError(
            f"{run.path} has ended and has no checkpoint, so there is nothing to continue from; train a new run on its "
            f"model: --model.name {shlex.quote(str(run.model))}"
        )
    return None


def drop_after(run: RunFolder, step: int) -> None:
    """Delete checkpoints and evaluations of later steps: they are done again."""
    later = [path for path in run.checkpoints.glob("step-[0-9]*") if step_of(path) > step]
    for path in [*later, *run.partial_checkpoints()]:
        shutil.rmtree(path)
    for name in run.eval_names():
        if isinstance(name, int) and name > step:
            run.eval_file(name).unlink()


def prune(folder: Path, keep_last: int, keep: Path | None = None) -> None:
    """Delete all but the newest `keep_last` step checkpoints and `keep`."""
    for old in step_checkpoints(folder)[:-keep_last]:
        if keep is None or old != keep:
            shutil.rmtree(old)
