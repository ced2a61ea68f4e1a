"""What findings are derived from: the metrics of a run, its settings, and example rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder, RunKind
from palestra.evals.examples import Example

Row = Mapping[str, float]
MIN_STEPS = 3  # before a run in progress is judged; also how many steps are its first and its last ones
SOLVED = 0.9  # pass rate above which a run needs no explanation
FAILED_CALLS = 0.9  # share of failed tool calls from which tools count as broken for the model

_SAMPLED_HERE = frozenset({"agent", "program", "prompts", "endpoint"})
# settings that take effect in some kinds of runs only; all others do in every kind
_KINDS: dict[str, frozenset[str]] = {
    "rollout.constrain_tool_calls": frozenset({"agent"}),
    "rollout.unexpected_call_format": frozenset({"agent"}),
    "rollout.max_tool_rounds": frozenset({"agent", "endpoint"}),
    "rollout.max_tool_result_chars": frozenset({"agent", "endpoint"}),
    "rollout.max_staleness": frozenset({"agent", "program", "wire"}),
    "rollout.temperature": _SAMPLED_HERE,
    "rollout.max_new_tokens": _SAMPLED_HERE,
    "rollout.group_size": frozenset({"agent", "function", "program", "prompts"}),
    "model.kv_memory_gib": frozenset({"agent", "function", "program", "prompts", "wire"}),
    "train.signal_share": frozenset({"agent", "function", "program"}),
}
# of the other settings, under which such a setting takes effect
_CONDITIONS: dict[str, Callable[[RunConfig], bool]] = {
    "rollout.constrain_tool_calls": lambda c: c.backend != "tinker" and c.vllm.mode == "off",
    "rollout.temperature": lambda c: c.backend != "tinker",
    "rollout.max_staleness": lambda c: not c.model.sleep_mode,
    "model.kv_memory_gib": lambda c: c.backend == "local" and c.vllm.mode == "off" and c.rollout.policy_url is None,
    "train.entropy_coefficient": lambda c: c.backend != "tinker",
    "train.signal_share": lambda c: c.train.filter_equal_groups and c.train.signal_share < 1,
}


class Remedy(NamedTuple):
    """Something to do about a finding; `setting` is the key that it changes, empty where it is none."""

    text: str
    setting: str = ""


WORKED_EXAMPLE = Remedy("show one call with its result in the instructions, and say when to call which tool")
LOWER_RATE = Remedy("lower train.learning_rate", "train.learning_rate")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps a run from learning. `settings` are the keys that its remedies change."""

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
        if not isinstance(record, dict) or not isinstance(record.get("sentence"), str):
            return None
        settings = record.get("settings")
        names = tuple(str(name) for name in settings) if isinstance(settings, list) else ()
        return cls(str(record.get("kind", "")), record["sentence"], names, Example.from_dict(record.get("example")))


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
        if setting == "rollout.max_staleness" and self.ranks > 1:
            return False
        holds = _CONDITIONS.get(setting, lambda config: True)
        return self.kind in _KINDS.get(setting, {self.kind}) and holds(self.config)

    def value(self, setting: str) -> Any:
        """The value of a setting; None where it is not known."""
        return self.config.value(setting) if self.config is not None and setting in RunConfig.settings() else None


@dataclass(frozen=True, slots=True)
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

    def mean(self, metric: str) -> float:
        """The mean of a metric over the recent steps; 0 where none has it."""
        return mean(self.recent, metric)

    def total(self, metric: str) -> float:
        return sum(row.get(metric, 0.0) for row in self.recent)

    def finding(self, kind: str, what: str, *remedies: Remedy, example: str = "") -> Finding:
        """A finding with those of the remedies that take effect in this run. `example` is the name of a trait."""
        chosen = [remedy for remedy in remedies if not remedy.setting or self.facts.allows(remedy.setting)]
        advice = f" To fix it: {'; or '.join(remedy.text for remedy in chosen)}." if chosen else ""
        settings = tuple(dict.fromkeys(remedy.setting for remedy in chosen if remedy.setting))
        return Finding(kind, f"{what}.{advice}", settings, self.examples.get(example))


def mean(rows: Sequence[Row], metric: str) -> float:
    values = [row[metric] for row in rows if metric in row]
    return sum(values) / len(values) if values else 0.0
