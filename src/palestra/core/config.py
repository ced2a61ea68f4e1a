"""One typed config behind the Python API, the YAML file and the command line.

Sections are the prefixes of command-line options: `--train.learning_rate 2e-5`, `--lora.r 8`.
Unknown keys are refused, with the closest known one named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from palestra.core.config_sections import (
    FULL_LEARNING_RATE,
    LORA_LEARNING_RATE,
    NEW_TOKENS,
    STEP_GROUP_SIZE,
    STEP_PROBLEMS,
    TINKER_LORA_RANK,
    AgentSection,
    CheckpointSection,
    EchoSection,
    EvalSection,
    LoraSection,
    ModelSection,
    RanksSection,
    RaySection,
    RolloutSection,
    Section,
    TinkerSection,
    TrackSection,
    TrainSection,
    VllmSection,
)
from palestra.core.errors import PalestraError, did_you_mean
from palestra.core.files import write_text


def full_learning_rate(parameters: int) -> float:
    """Learning rate for training all weights of a model of this size.

    It falls with size: `palestra/tiny` (0.76 M) learns at 1e-3 but not at 1e-5; 1e-5 destroyed a model of 1.5 B.

    >>> [f"{full_learning_rate(size):.3g}" for size in (2_000_000, 50_000_000, 135_000_000, 200_000_000)]
    ['0.001', '4e-05', '1e-05', '1e-05']
    >>> [f"{full_learning_rate(size):.3g}" for size in (1_500_000_000, 2_000_000_000, 70_000_000_000)]
    ['1.33e-06', '1e-06', '1e-06']
    """
    if parameters < 1e8:
        return min(1e-3, FULL_LEARNING_RATE * (1e8 / parameters) ** 2)
    return max(1e-6, FULL_LEARNING_RATE * min(1.0, 2e8 / parameters))


def lora_learning_rate(parameters: int) -> float:
    """Learning rate for the adapters of a model of this size.

    >>> [f"{lora_learning_rate(size):.3g}" for size in (2_000_000, 1_000_000_000, 3_000_000_000, 70_000_000_000)]
    ['0.0001', '0.0001', '3.33e-05', '2e-05']
    """
    return max(2e-5, LORA_LEARNING_RATE * min(1.0, 1e9 / max(1, parameters)))


class RunConfig(Section):
    """Everything that decides a run. The same config and seed give the same run."""

    seed: int = Field(0, ge=0, lt=2**32)  # as much as NumPy's generator takes
    backend: Literal["local", "ray", "tinker"] = Field(
        "local",
        description="local: this machine; ray: trained here, sampled by actors on a Ray cluster (docs/scaling.md); "
        "tinker: on a Tinker server (docs/tinker_backend.md)",
    )
    output_dir: str = Field("runs", description="folder that run folders are made in")
    model: ModelSection = Field(default_factory=ModelSection)
    train: TrainSection = Field(default_factory=TrainSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    agent: AgentSection = Field(default_factory=AgentSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    vllm: VllmSection = Field(default_factory=VllmSection)
    tinker: TinkerSection = Field(default_factory=TinkerSection)
    ray: RaySection = Field(default_factory=RaySection)
    ranks: RanksSection = Field(default_factory=RanksSection)
    echo: EchoSection = Field(default_factory=EchoSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    track: TrackSection = Field(default_factory=TrackSection)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_backend(cls, settings: Any) -> Any:
        """A Tinker server trains adapters, and scores tokens at temperature 1."""
        if not isinstance(settings, dict) or settings.get("backend") != "tinker":
            return settings
        defaults: dict[str, dict[str, Any]] = {"rollout": {"temperature": 1.0}, "lora": {"r": TINKER_LORA_RANK}}
        chosen = {name: settings.get(name) or {} for name in defaults}
        return settings | {name: own | chosen[name] for name, own in defaults.items() if isinstance(chosen[name], dict)}

    @model_validator(mode="after")
    def _sampling_needs_its_cache(self) -> RunConfig:
        if self.model.sleep_mode and self.rollout.max_staleness:
            raise ValueError(
                f"model.sleep_mode takes the sampler's memory while the learner works, and rollout.max_staleness = "
                f"{self.rollout.max_staleness} samples meanwhile; choose one of them"
            )
        return self

    @property
    def importance_correction(self) -> str:
        """train.importance_correction with `auto` resolved."""
        chosen = self.train.importance_correction
        may_differ = self.rollout.max_staleness > 0 or self.vllm.mode != "off"
        return ("token_truncate" if may_differ else "none") if chosen == "auto" else chosen

    def default_learning_rate(self, parameters: int) -> float:
        """The learning rate that suits a model of this size: of its adapters, or of all weights."""
        return (lora_learning_rate if self.lora.r else full_learning_rate)(parameters)

    def with_learning_rate(self, parameters: int) -> RunConfig:
        """Set the learning rate that suits a model of this size, unless one is given."""
        if self.train.learning_rate is not None:
            return self
        rate = self.default_learning_rate(parameters)
        return self.model_copy(update={"train": self.train.model_copy(update={"learning_rate": rate})})

    def with_step_size(
        self, problems: int = STEP_PROBLEMS, group_size: int = STEP_GROUP_SIZE, max_new_tokens: int = NEW_TOKENS
    ) -> RunConfig:
        """Set the step sizes that are not given. The defaults are for callers that do not know the model."""
        values = {
            "train.problems_per_step": problems,
            "rollout.group_size": group_size,
            "rollout.max_new_tokens": max_new_tokens,
        }
        missing = {key: value for key, value in values.items() if self.value(key) is None}
        return self.with_settings(missing) if missing else self

    def with_settings(self, changes: Mapping[str, Any]) -> RunConfig:
        """This config with other values of some settings, by dotted key; checked as a whole."""
        return RunConfig.build(self.model_dump(mode="json"), changes)

    @classmethod
    def build(cls, *layers: Mapping[str, Any]) -> RunConfig:
        """The defaults, overlaid by each layer in turn; a wrong key or value raises PalestraError."""
        merged: dict[str, Any] = {}
        for layer in layers:
            _refuse_twice(layer)
            _overlay(merged, layer)
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            raise PalestraError(explain(error, list(cls.keys()))) from None

    def save(self, path: Path) -> None:
        """As one YAML document, from `---` to `...`: without its end a file was cut off, though the rest parses."""
        import yaml

        data = self.model_dump(mode="json")
        write_text(path, yaml.safe_dump(data, sort_keys=False, explicit_start=True, explicit_end=True))

    def refuse(self, keys: Iterable[str], why: str) -> None:
        """Refuse settings that would have no effect here; `echo` stands for all settings of its section."""
        for key, info in self.settings().items():
            if any(key == name or key.startswith(f"{name}.") for name in keys):
                value, default = self.value(key), info.get_default(call_default_factory=True)
                if value != default:
                    raise PalestraError(f"{key} = {value!r} has no effect here: {why}; leave it at {default!r}")

    def value(self, key: str) -> Any:
        """The setting of this dotted key."""
        return reduce(getattr, key.split("."), self)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Every dotted key with its one-line description."""
        return {key: info.description or "" for key, info in cls.settings().items()}

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """Every setting by its dotted key."""
        return dict(_walk(cls, ""))


def _refuse_twice(layer: Mapping[str, Any]) -> None:
    """A setting that one layer gives two values, in its section and by its dotted name: either may be meant.

    >>> _refuse_twice({"lora": {"r": 8}, "lora.r": 16})
    Traceback (most recent call last):
    palestra.core.errors.PalestraError: lora.r is given twice, as 8 and as 16; give it once
    """
    found: dict[str, Any] = {}

    def note(prefix: str, content: Any) -> None:
        if isinstance(content, Mapping) and content:
            for name, value in content.items():
                note(f"{prefix}.{name}" if prefix else str(name), value)
        elif found.setdefault(prefix, content) != content:
            raise PalestraError(f"{prefix} is given twice, as {found[prefix]!r} and as {content!r}; give it once")

    note("", layer)


def _overlay(base: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Lay settings over settings; `{"lora.r": 8}` and `{"lora": {"r": 8}}` say the same."""
    for name, content in layer.items():
        key, dot, rest = name.partition(".")
        value = {rest: content} if dot else content
        if isinstance(value, Mapping):
            if not isinstance(base.get(key), dict):
                base[key] = {}
            _overlay(base[key], value)
        else:
            base[key] = value


def _walk(section: type[Section], prefix: str) -> list[tuple[str, FieldInfo]]:
    found: list[tuple[str, FieldInfo]] = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found += _walk(kind, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", info))
    return found


def explain(error: ValidationError, known: list[str]) -> str:
    """Pydantic's errors, one a line, with the keys of the command line."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {key!r}.{did_you_mean(key, known)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            lines.append(f"{key}: {message}{got}")
    return "\n".join(lines)
