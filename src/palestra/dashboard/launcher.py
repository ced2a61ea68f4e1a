"""The interface by which the dashboard starts trainings; `agent_tools.launcher` implements it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.runs.manager import Run


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained on: an environment by its name, or an agent file ("demo" is the demo)."""

    environment: str | None = None
    agent_file: str | None = None


class Launcher(Protocol):
    """Starts trainings and tests. What is refused raises PalestraError, with `more["field"]` where one is at fault."""

    def environments(self) -> dict[str, Any]: ...

    def environment(self, name: str) -> dict[str, Any]: ...

    def form(self, subject: Subject) -> dict[str, Any]: ...

    def check(self, subject: Subject, values: Mapping[str, Any]) -> dict[str, str]:
        """What is wrong, by field."""
        ...

    def start(self, subject: Subject, values: Mapping[str, Any], name: str | None) -> Run: ...

    def test(
        self,
        subject: Subject,
        values: Mapping[str, Any],
        models: Sequence[str] | None,
        num_steps: int,
        group_size: int,
        progress: Callable[[float, float, str], None],
        cancelled: threading.Event,
    ) -> Mapping[str, Any]: ...
