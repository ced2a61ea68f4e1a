"""What a program left behind: its exit status, its output and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_LOG_CHARS = 4000


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """One run of an agent's program. `stopped` says which limit ended it, if one did; `result` is what it wrote to its
    result file (JSON, or text), what a function returned, or what was posted with the reward."""

    exit_code: int = 0  # negative: the signal that ended it
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    stopped: Literal["time", "output"] | None = None
    result: Any = None
    reward: float | None = None  # where an external agent has posted one
    error: str | None = None  # posted by an external agent; the attempt counts as failed

    def failure(self, timeout_s: float, max_output_bytes: int) -> str | None:
        """Why the attempt counts as failed; None where the program ended by itself, with whatever status.

        A program that gives up on what the model said ends with a status other than 0: that attempt is scored.
        """
        if self.error is not None:
            return f"the agent posted an error: {self.error[:_LOG_CHARS]}"
        if self.stopped == "time":
            return f"the agent took longer than {timeout_s:g} s (agent.timeout_s) and was ended{self._last_line()}"
        if self.stopped == "output":
            return f"the agent wrote more than {max_output_bytes} bytes (agent.max_output_bytes) and was ended"
        if self.exit_code < 0:
            return f"the agent was ended by signal {-self.exit_code}{self._last_line()}"
        return None

    def _last_line(self) -> str:
        lines = (self.stderr or self.stdout).strip().splitlines()
        return f"; its last line was: {lines[-1][:300]}" if lines else ""

    def explain_silence(self) -> str:
        """The error of an attempt in which the model was never asked."""
        return f"the agent ended with status {self.exit_code} without asking the model{self._last_line()}"

    def record(self) -> dict[str, Any]:
        """For the run's records: the ends of long texts."""
        fields = {"exit_code": self.exit_code, "stdout": self.stdout[-_LOG_CHARS:], "stderr": self.stderr[-_LOG_CHARS:]}
        return fields | ({"stopped": self.stopped} if self.stopped else {})
