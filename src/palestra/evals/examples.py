"""Example rollouts for findings: where they are on disk, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from palestra.core.files import last_lines, parse_row
from palestra.core.group_codec import rollout_from_dict
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_call
from palestra.core.types import Rollout
from palestra.evals.rollout_stats import (
    CALL_PROBLEM_RATES,
    CallProblem,
    call_problem,
    called_successfully,
    has_unread_call,
    has_unrun_call,
    loops,
    model_messages,
)

_MAX_CHARS = 200
_TAIL_BYTES = 4_000_000  # of rollouts.jsonl, searched for examples of a run on disk


_FIELD_TYPES = {"source": str, "step": int, "index": int, "problem_id": str, "text": str}


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout that shows what a finding says.

    `source` is "train" (rollouts.jsonl), "before" or "after" (evals/), or "" for one that is not on disk. `index`
    counts from 0, in its file or, for training, among the rollouts of its step.
    """

    source: str
    step: int
    index: int
    problem_id: str
    text: str

    @property
    def location(self) -> str:
        if self.source == "train":
            return f"rollouts.jsonl, step {self.step}, rollout {self.index}"
        if self.source:
            return f"evals/{self.source}.jsonl, line {self.index + 1}"
        return f"problem {self.problem_id}"

    def __str__(self) -> str:
        return f"Example ({self.location}): {self.text}" if self.text else f"Example: {self.location}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"location": self.location}

    @classmethod
    def from_dict(cls, record: Any) -> Example | None:
        """Read an example of report.json; None if there is none or it is malformed."""
        if not isinstance(record, dict) or not all(isinstance(record.get(n), t) for n, t in _FIELD_TYPES.items()):
            return None
        return cls(*(record[name] for name in _FIELD_TYPES))


def find_examples(rollouts: Sequence[Rollout], source: str = "", step: int = 0) -> dict[str, Example]:
    """One example of each trait that a rollout has, by the name of the trait."""
    found: dict[str, Example] = {}
    for trait, text_of in _TRAITS.items():
        for index, rollout in enumerate(rollouts):
            text = text_of(rollout)
            if text is not None:
                found[trait] = Example(source, step, index, rollout.problem_id, _shorten(text))
                break
    return found


def recorded_examples(folder: RunFolder) -> dict[str, Example]:
    """Examples from the newest rollouts on disk; of each trait the newest."""
    path = folder.rollouts_file
    lines = last_lines(path, _TAIL_BYTES, _TAIL_BYTES)
    rows = [row for line in lines if (row := parse_row(line.encode())) is not None]
    steps = [(step, list(members)) for step, members in groupby(rows, lambda row: row.get("step"))]
    if path.is_file() and path.stat().st_size > _TAIL_BYTES:
        steps = steps[1:]  # its first rollouts may be missing, so that their numbers are not known
    found: dict[str, Example] = {}
    for step, members in steps:
        try:
            found |= find_examples([rollout_from_dict(row) for row in members], "train", int(step))
        except (KeyError, TypeError, ValueError):  # a damaged line
            continue
    return found


TextOf = Callable[[Rollout], str | None]  # the text of a rollout with the trait; None for others


def _trait(has_trait: Callable[[Rollout], bool]) -> TextOf:
    """A trait whose text is the model's last message."""
    return lambda rollout: _last_text(rollout) if rollout.error is None and has_trait(rollout) else None


def _call_trait(problem: CallProblem) -> TextOf:
    """A trait of rollouts with such a call; the text is the call and its result."""

    def text_of(rollout: Rollout) -> str | None:
        for result in rollout.tool_results:
            if call_problem(result, rollout.tool_names) == problem:
                return " → ".join(
                    part for part in (show_call(result.call), result.content or result.call.error) if part
                )
        return None

    return text_of


def _measure_error(rollout: Rollout) -> str | None:
    return next((f"{name}: {score.reason}" for name, score in rollout.scores.items() if score.error), None)


_TRAITS: dict[str, TextOf] = {
    "measure_error": _measure_error,
    "failure": lambda rollout: rollout.error,
    "unread_call": _trait(has_unread_call),
    "unrun_call": _trait(has_unrun_call),
    **{problem: _call_trait(problem) for problem in CALL_PROBLEM_RATES},
    "no_call": _trait(lambda r: bool(r.tool_names) and not r.tool_results),
    "context_full": _trait(lambda r: r.stop == "context_full"),
    "truncated": _trait(lambda r: r.stop == "truncated" and not loops(r)),
    "tool_limit": _trait(lambda r: r.stop == "tool_limit"),
    "looping": _trait(lambda r: r.cut_off and loops(r)),
    "guess": _trait(lambda r: bool(r.tool_names) and r.reward > 0 and not called_successfully(r)),
    "reward_for_failed_calls": _trait(lambda r: r.reward > 0 and bool(r.tool_results) and not called_successfully(r)),
    "passed": _trait(lambda r: r.passed),
    "not_passed": _trait(lambda r: not r.passed),
}


def _last_text(rollout: Rollout) -> str:
    for message in reversed(model_messages(rollout)):
        calls = ", ".join(show_call(call) for call in message.tool_calls)
        if text := " ".join(part for part in (message.text, calls) if part):
            return text
    return ""


def _shorten(text: str) -> str:
    line = " ".join(_words(text))
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"


def _words(text: str) -> Iterable[str]:
    return text[: 4 * _MAX_CHARS].split()
