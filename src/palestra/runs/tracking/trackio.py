"""Trackio: a local dashboard (`trackio show`), or the Space of TRACKIO_SPACE_ID."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio


class TrackioService:
    """One Trackio run; a resumed training continues the run of the same name."""

    def __init__(self, project: str, name: str, settings: Mapping[str, Any], resumed: bool) -> None:
        self._run = trackio.init(
            project, name=name, config=dict(settings), resume="allow" if resumed else "never", embed=False
        )

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()
