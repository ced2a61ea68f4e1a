"""Weights & Biases: online, or offline (WANDB_MODE=offline) into the run folder."""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import wandb

from palestra.core.errors import PalestraError
from palestra.core.files import write_text
from palestra.core.run_folder import RunFolder

_MODES_WITHOUT_KEY = ("offline", "dryrun", "disabled")


class WandbService:
    """One W&B run; a resumed training continues it."""

    def __init__(
        self, folder: RunFolder, project: str, name: str, entity: str | None, settings: Mapping[str, Any], resumed: bool
    ) -> None:
        check_key()
        if not (resumed and folder.wandb_id_file.exists()):
            write_text(folder.wandb_id_file, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=name,
            dir=folder.path,
            id=folder.wandb_id_file.read_text(),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(console="off"),  # capturing stdout would break the progress bar
        )
        if self._run.url:  # not when offline
            write_text(folder.wandb_url_file, str(self._run.url))
        # Our own step is the x axis: W&B's step only increases, but a resumed run may repeat steps.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({"step": step, **row})

    def close(self) -> None:
        self._run.finish()


def check_key() -> None:
    """Raise where W&B would ask for a key."""
    if os.environ.get("WANDB_MODE", "online") not in _MODES_WITHOUT_KEY and not _has_key():
        raise PalestraError(
            "report_to 'wandb' needs WANDB_API_KEY, which is not set; set it, run `wandb login`, "
            "or set WANDB_MODE=offline to keep the run on this machine"
        )


def _has_key() -> bool:
    """Whether W&B finds a key without a prompt: in the variable, or stored by `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
