"""The evidence for findings: the metrics of a run, its settings, and example rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import msgspec

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.files import last_lines, parse_row
from palestra.core.group_codec import rollout_from_dict
from palestra.core.run_folder import RunFolder, RunKind
from palestra.evals.rollout_stats import Example, find_examples

_TAIL_BYTES = 4_000_000  # of rollouts.jsonl, searched for examples of a run on disk


def recorded_examples(folder: RunFolder) -> dict[str, Example]:
    """Examples from the newest rollouts on disk, by trait."""
    path = folder.rollouts_file
    lines = last_lines(path, _TAIL_BYTES, _TAIL_BYTES)
    rows = [row for line in lines if (row := parse_row(line.encode())) is not None]
    steps = [(step, list(members)) for step, members in groupby(rows, lambda row: row.get("step"))]
    if path.is_file() and path.stat().st_size > _TAIL_BYTES:
        steps = steps[1:]  # its first rollouts may be missing, so that their numbers are not known
    examples: dict[str, Example] = {}
    for step, members in steps:
        try:
            examples |= find_examples([rollout_from_dict(row) for row in members], "train", int(step))
        except (KeyError, TypeError, ValueError):  # a damaged line
            continue
    return examples


Row = Mapping[str, float]
MIN_STEPS = 3  # before a run in progress is judged; also the number of its first and of its last steps
_GAIN = 0.05  # of a pass rate, or of the range of the rewards

_SAMPLED_HERE = ("agent", "program", "prompts", "endpoint")
_TRAINED_HERE = ("agent", "function", "program", "prompts", "wire")
# by the kind and the settings of a run: whether a setting takes effect; all others always do
TAKES_EFFECT: dict[str, Callable[[RunKind, RunConfig], bool]] = {
    "rollout.constrain_tool_calls": lambda kind, c: kind == "agent" and c.backend != "tinker" and c.vllm_mode == "off",
    "rollout.unexpected_call_format": lambda kind, c: kind == "agent",
    "rollout.max_tool_rounds": lambda kind, c: kind in ("agent", "endpoint"),
    "rollout.max_tool_result_chars": lambda kind, c: kind in ("agent", "endpoint"),
    "rollout.max_staleness": lambda kind, c: kind in ("agent", "program", "wire") and not c.model.sleep_mode,
    "rollout.temperature": lambda kind, c: kind in _SAMPLED_HERE and c.backend != "tinker",
    "rollout.max_new_tokens": lambda kind, c: kind in _SAMPLED_HERE,
    "rollout.group_size": lambda kind, c: kind in _TRAINED_HERE and kind != "wire",
    "model.kv_memory_gib": lambda kind, c: kind in _TRAINED_HERE and c.has_own_engine,
    "train.entropy_coefficient": lambda kind, c: c.backend != "tinker",
    "train.signal_share": lambda kind, c: (
        kind in ("agent", "function", "program") and c.train.filter_equal_groups and c.train.signal_share < 1
    ),
    "stages.plan": lambda kind, c: (
        kind == "agent" and c.stages.plan == "grpo" and c.backend == "local" and not c.rollout.max_staleness
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why a run learns little. `settings` are the keys that its remedies change."""

    kind: str
    sentence: str
    settings: tuple[str, ...] = ()
    example: Example | None = None

    def __str__(self) -> str:
        return self.sentence if self.example is None else f"{self.sentence} {self.example}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"example": self.example and self.example.to_dict()}

    @classmethod
    def from_dict(cls, record: Any) -> Finding | None:
        """Read a finding of report.json; None if it is malformed. Those of older versions have fewer fields."""
        try:
            return msgspec.convert({"kind": "", **record}, cls)
        except (msgspec.ValidationError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Config, kind and size of a run. Without a config, findings recommend no settings."""

    config: RunConfig | None = None
    kind: RunKind = "agent"
    context_tokens: int | None = None  # of the model; None where it is not known
    ranks: int = 1

    @classmethod
    def of_folder(cls, folder: RunFolder) -> RunFacts:
        """The facts of a run on disk, as far as its files can be read."""
        try:
            record = folder.record
            config = folder.config if folder.config_file.is_file() else None
        except (OSError, PalestraError):
            return cls(kind="other")
        kind: RunKind = record.get("kind") or ("wire" if "env_url" in record else "other")
        return cls(config, kind, record.get("context_tokens"), record.get("ranks", 1))

    def allows(self, setting: str) -> bool:
        """Whether changing this setting has an effect in this kind of run."""
        if self.config is None or setting not in RunConfig.settings():
            return False
        if setting in ("rollout.max_staleness", "stages.plan") and self.ranks > 1:
            return False
        return setting not in TAKES_EFFECT or TAKES_EFFECT[setting](self.kind, self.config)

    def __getitem__(self, setting: str) -> Any:
        """The value of a setting; None if the config is unknown."""
        return None if self.config is None else self.config.value(setting)

    def limit(self, setting: str, otherwise: str) -> str:
        """A limit as "setting=value" if the run has this setting, else in words."""
        return f"{setting}={self[setting]}" if self[setting] is not None and self.allows(setting) else otherwise


@dataclass(frozen=True)
class Evidence:
    """The metrics of a run or an evaluation, with everything that rules look at.

    `steps` are the rows of all steps, `recent` the newest of them, and `when` names these in a sentence.
    """

    steps: Sequence[Row]
    recent: Sequence[Row]
    when: str
    facts: RunFacts = RunFacts()
    examples: Mapping[str, Example] = field(default_factory=dict)
    ended: bool = False

    def __getitem__(self, metric: str) -> float:
        """The mean of a metric over the recent steps; 0 if none has it."""
        return mean(self.recent, metric)

    def total(self, metric: str) -> float:
        return sum(row.get(metric, 0.0) for row in self.recent)

    @cached_property
    def learning(self) -> Sequence[Row]:
        """Steps that learn from rewards alone: without a teacher, groups with equal rewards teach nothing."""
        return [row for row in (self.steps if self.ended else self.recent) if not row.get("tokens_distilled")]

    @cached_property
    def equal(self) -> Sequence[Row]:
        """Steps in which all rollouts of each problem earned the same reward; none unless most steps are like that."""
        equal = [row for row in self.learning if row.get("equal_reward_groups") == 1.0]
        return equal if len(equal) >= max(1.0, len(self.learning) / (2 if self.ended else 1)) else []

    @property
    def equal_count(self) -> str:
        total = len(self.equal)
        return f"{total} of {len(self.learning)} steps" if self.ended else f"the last {total} steps"

    @property
    def equal_rewards(self) -> str:
        lowest, highest = min(row["reward_min"] for row in self.equal), max(row["reward_max"] for row in self.equal)
        return f"{lowest:.3g}" if lowest == highest else f"{lowest:.3g} to {highest:.3g}"

    def is_cut_off_by(self, cause: str, rate: float) -> bool:
        """Whether more than this share of the rollouts is cut off, most of them by this cause."""
        return self["truncation_rate"] > rate and self[cause] > self["truncation_rate"] / 2

    @property
    def longest(self) -> float:
        """Tokens of the longest conversation."""
        return max(row.get("conversation_length_max", 0.0) for row in self.recent)

    @property
    def teacher(self) -> str | None:
        """The other model of a distillation."""
        return self.facts["distill.teacher"] or self.facts["distill.teacher_url"]

    # How the last steps differ from the first ones.

    @property
    def first(self) -> Sequence[Row]:
        return self.steps[:MIN_STEPS]

    @property
    def last(self) -> Sequence[Row]:
        return self.steps[-MIN_STEPS:]

    @property
    def has_trend(self) -> bool:
        return len(self.steps) >= 2 * MIN_STEPS

    @property
    def is_judged(self) -> bool:
        """Whether a measure decides that rollouts pass."""
        return any("pass_rate" in row for row in self.last)

    def passes_more(self, solved: float) -> bool:
        """Whether the pass rate rose or is high; without one, whether the reward rose."""
        if not self.is_judged:
            return self.earns_more
        before, after = mean(self.first, "pass_rate"), mean(self.last, "pass_rate")
        return after >= before + _GAIN or after > solved

    @property
    def earns_more(self) -> bool:
        rows = [row for row in (*self.first, *self.last) if "reward_max" in row]
        if not rows:
            return False
        span = max(row["reward_max"] for row in rows) - min(row["reward_min"] for row in rows)
        return span > 0 and mean(self.last, "reward_mean") >= mean(self.first, "reward_mean") + _GAIN * span

    @property
    def change(self) -> str:
        """How pass rate or reward changed, in words."""
        name, style = ("pass_rate", ".1%") if self.is_judged else ("reward_mean", ".3g")
        before, after = mean(self.first, name), mean(self.last, name)
        return f"{'pass rate' if self.is_judged else 'mean reward'} went from {before:{style}} to {after:{style}}"


def mean(rows: Sequence[Row], metric: str) -> float:
    values = [row[metric] for row in rows if metric in row]
    return sum(values) / len(values) if values else 0.0
