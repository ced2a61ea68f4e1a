"""A run is a folder: config, metrics, rollouts, checkpoints, report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.files import write_json


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run.

    runs/demo-20260131-101500/
      run.json            name, source (the agent's file), when it was made
      config.yaml         the resolved config
      metrics.jsonl       one object a step
      rollouts.jsonl      one object a rollout: messages, scores, token ids
      checkpoints/        step-000050, …
      model/              the trained weights, once training has ended
      report.json, report.html
    """

    path: Path

    @classmethod
    def create(
        cls, parent: Path, name: str, config: RunConfig, record: Mapping[str, Any], *, at: Path | None = None
    ) -> RunFolder:
        """Make a new, uniquely named run folder; or make the folder `at` one, which may exist but hold no run."""
        path = new_folder(parent, name) if at is None else at
        if (path / "run.json").exists():
            raise PalestraError(f"{path} holds a run already; go on with it by --resume, or choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PalestraError(f"cannot make the run folder {path} ({error.strerror}); choose another") from None
        config.save(path / "config.yaml")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        write_json(path / "run.json", {"name": plain_name(name), "created": stamp, **record})
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "run.json").is_file():
            raise PalestraError(
                f"{path} is not a run folder: it has no run.json. Give a folder that `palestra train` made"
            )
        return cls(path)

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "run.json").read_text()))

    @property
    def config(self) -> RunConfig:
        import yaml

        return RunConfig.build(yaml.safe_load((self.path / "config.yaml").read_text()))

    def lengthen(self, max_steps: int | None) -> None:
        """Let the run have more steps than it was started with; resume it to go on. Schedules then end later.

        None leaves it as it is.
        """
        if max_steps is None:
            return
        longer = RunConfig.build(self.config.model_dump(mode="json"), {"train": {"max_steps": max_steps}})
        done = int(self.step_checkpoints[-1].name.removeprefix("step-")) if self.step_checkpoints else 0
        before = max(self.config.train.max_steps or 0, done)
        if (longer.train.max_steps or 0) <= before:
            raise PalestraError(
                f"train.max_steps={max_steps}, but {self.path} has {before} steps already; a resumed run can be made "
                "longer, not shorter"
            )
        longer.save(self.path / "config.yaml")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def step_checkpoints(self) -> list[Path]:
        """Those that are finished, oldest first."""
        return sorted(manifest.parent for manifest in self.checkpoints.glob("step-*/manifest.json"))

    @property
    def model(self) -> Path:
        return self.path / "model"


def new_folder(parent: Path, name: str, remedy: str = "choose another --output_dir") -> Path:
    """Make an empty folder that has this name and the time in its own, and has never been there before."""
    name, stamp = plain_name(name), time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = parent / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise PalestraError(f"cannot make the folder {path} ({error.strerror}); {remedy}") from None
    raise PalestraError(f"too many folders named {name} in {parent}; {remedy}")


def plain_name(name: str) -> str:
    """A name that can be one of a folder.

    >>> plain_name("my env/v2")
    'my-env-v2'
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
