"""Weights & Biases: online, or offline (WANDB_MODE=offline) into the run folder."""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from palestra.core.errors import PalestraError
from palestra.core.files import write_text

RUN_ID_FILE = "wandb_run_id"
WITHOUT_KEY = ("offline", "dryrun", "disabled")


class WandbService:
    """One W&B run; a resumed training goes on with the same one."""

    def __init__(
        self, folder: Path, project: str, name: str, entity: str | None, settings: Mapping[str, Any], resumed: bool
    ) -> None:
        if os.environ.get("WANDB_MODE", "online") not in WITHOUT_KEY and not _has_key():
            raise PalestraError(
                "report_to 'wandb' needs WANDB_API_KEY, which is not set; set it, run `wandb login`, "
                "or set WANDB_MODE=offline to keep the run on this machine"
            )
        stored = folder / RUN_ID_FILE
        if not (resumed and stored.exists()):
            write_text(stored, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=name,
            dir=folder,
            id=stored.read_text(),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(console="off"),  # its capture of stdout would break the progress bar
        )
        # Our own step as the axis: W&B's only counts up, but a resumed run does some steps again.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({"step": step, **row})

    def close(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    """Whether W&B will find a key without asking: the variable, or what `wandb login` stored."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
