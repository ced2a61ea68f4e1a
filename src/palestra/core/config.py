"""One typed config behind the Python API, the YAML file and the command line.

Sections are the prefixes of command-line options: `--train.learning_rate 2e-5`, `--lora.r 8`.
Unknown keys are refused, with the closest known one named.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from palestra.core import config_sections as sections
from palestra.core import extras
from palestra.core.config_sections import FULL_LEARNING_RATE, LORA_LEARNING_RATE, NEW_TOKENS, Section, StagesSection
from palestra.core.errors import NotFoundError, SettingError, UnreadableFileError, did_you_mean
from palestra.core.files import write_text

log = logging.getLogger("palestra")


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


class _CoreConfig(Section):
    """Everything that decides a run. The same config and seed give the same run."""

    seed: int = Field(0, ge=0, lt=2**32)  # as much as NumPy's generator takes
    backend: Literal["local", "ray", "tinker"] = "local"
    """local: this machine; ray: trained here, sampled by actors on a Ray cluster (docs/scaling.md); tinker: on a
    Tinker server (docs/tinker_backend.md)"""
    output_dir: str = Field("runs", description="folder that run folders are made in")
    model: sections.ModelSection = Field(default_factory=sections.ModelSection)
    train: sections.TrainSection = Field(default_factory=sections.TrainSection)
    rollout: sections.RolloutSection = Field(default_factory=sections.RolloutSection)
    agent: sections.AgentSection = Field(default_factory=sections.AgentSection)
    lora: sections.LoraSection = Field(default_factory=sections.LoraSection)
    ranks: sections.RanksSection = Field(default_factory=sections.RanksSection)
    echo: sections.EchoSection = Field(default_factory=sections.EchoSection)
    stages: StagesSection = Field(default_factory=StagesSection)
    eval: sections.EvalSection = Field(default_factory=sections.EvalSection)
    checkpoint: sections.CheckpointSection = Field(default_factory=sections.CheckpointSection)
    track: sections.TrackSection = Field(default_factory=sections.TrackSection)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_backend(cls, settings: Any) -> Any:
        """Settings that suit the backend, unless others are chosen."""
        if not isinstance(settings, dict):
            return settings
        defaults = getattr(EXTRA_SECTIONS.get(str(settings.get("backend"))), "RUN_DEFAULTS", {})
        chosen = {name: settings.get(name) or {} for name in defaults}
        return settings | {name: own | chosen[name] for name, own in defaults.items() if isinstance(chosen[name], dict)}

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        model, train, rollout, echo = self.model, self.train, self.rollout, self.echo
        if model.sleep_mode and rollout.max_staleness:
            raise ValueError(
                "model.sleep_mode takes the sampler's memory while the learner works, and rollout.max_staleness = "
                f"{rollout.max_staleness} keeps sampling; choose one of them"
            )
        if echo.coefficient and not rollout.keep_reasoning:
            raise ValueError(
                "rollout.keep_reasoning = false renders the history again for each turn, so that tool results are part "
                "of prompts, and echo.coefficient learns none of them; choose one of them"
            )
        if train.deterministic and (rollout.max_staleness or not self.has_own_engine):
            raise ValueError(
                "train.deterministic needs our engine and steps one after the other; leave out rollout.max_staleness, "
                "vllm.mode, rollout.policy_url and other backends than local"
            )
        if model.exact and (not self.has_own_engine or model.engine == "plain"):
            raise ValueError("model.exact needs our engine; leave out model.engine, vllm.mode, policy_url and backend")
        cuts = (rollout.top_p, rollout.top_k, rollout.min_p, rollout.repetition_penalty) != (1.0, 0, 0.0, 1.0)
        if model.exact and (cuts or rollout.constrain_tool_calls):
            raise ValueError(
                "model.exact samples from the whole distribution; leave out rollout.top_p, top_k, min_p, "
                "repetition_penalty and constrain_tool_calls"
            )
        routing = f"train.expert_routing = {train.expert_routing}"
        if train.expert_routing != "own" and (not self.has_own_engine or model.engine == "plain"):
            raise ValueError(
                f"{routing} needs our engine, which records the experts; leave out model.engine, vllm.mode, "
                "rollout.policy_url, backend"
            )
        has_grpo = self.stages.plan == "auto" or "grpo" in self.stages.plan
        if train.expert_routing != "own" and (not has_grpo or self.distill_only):
            raise ValueError(f"{routing} is for grpo steps with a policy loss; leave it at own")
        if self.distill_only and (echo.coefficient or train.entropy_coefficient):
            raise ValueError(
                "distill.only leaves out all other losses; set echo.coefficient and train.entropy_coefficient to 0"
            )
        if getattr(getattr(self, "distill", None), "teacher_url", None) is not None and rollout.temperature != 1:
            raise ValueError("distill.teacher_url scores tokens at temperature 1; set rollout.temperature to 1")
        return self

    @cached_property
    def vllm_mode(self) -> str:
        """vllm.mode; off where that extra is missing."""
        section = getattr(self, "vllm", None)
        return "off" if section is None else str(section.mode)

    @cached_property
    def distill_coefficient(self) -> float:
        """distill.coefficient; 0 where that extra is missing."""
        section = getattr(self, "distill", None)
        return 0.0 if section is None else float(section.coefficient)

    @cached_property
    def distill_only(self) -> bool:
        """distill.only; false where that extra is missing."""
        section = getattr(self, "distill", None)
        return section is not None and bool(section.only)

    @property
    def has_own_engine(self) -> bool:
        """Whether the engine of this process samples."""
        return self.backend == "local" and self.vllm_mode == "off" and self.rollout.policy_url is None

    @cached_property
    def importance_correction(self) -> str:
        """train.importance_correction with `auto` resolved."""
        chosen = self.train.importance_correction
        may_differ = self.rollout.max_staleness > 0 or self.vllm_mode != "off"
        return ("token_truncate" if may_differ else "none") if chosen == "auto" else chosen

    def default_learning_rate(self, parameters: int) -> float:
        """The learning rate that suits a model of this size: of its adapters, or of all weights."""
        return (lora_learning_rate if self.lora.r else full_learning_rate)(parameters)

    def with_learning_rate(self, parameters: int) -> Self:
        """Set the learning rate that suits a model of this size, unless one is given."""
        if self.train.learning_rate is not None:
            return self
        rate = self.default_learning_rate(parameters)
        return self.model_copy(update={"train": self.train.model_copy(update={"learning_rate": rate})})

    def with_step_size(
        self,
        problems: int = sections.STEP_PROBLEMS,
        group_size: int = sections.STEP_GROUP_SIZE,
        max_new_tokens: int = NEW_TOKENS,
    ) -> Self:
        """Set the step sizes that are not given. The defaults are for callers that do not know the model."""
        values = {"train.problems_per_step": problems, "rollout.group_size": group_size}
        values["rollout.max_new_tokens"] = max_new_tokens
        missing = {key: value for key, value in values.items() if self.value(key) is None}
        return self.with_settings(missing) if missing else self

    def with_settings(self, changes: Mapping[str, Any]) -> Self:
        """This config with other values of some settings, by dotted key; checked as a whole."""
        return self.build(self.model_dump(mode="json"), changes)

    @classmethod
    def of(cls, config: Self | Mapping[str, Any] | None) -> Self:
        """A config as functions of the API take it: settings by their names, or a config."""
        return cls.build(config or {}) if config is None or isinstance(config, Mapping) else config

    @classmethod
    def build(cls, *layers: Mapping[str, Any]) -> Self:
        """The defaults, overlaid by each layer in turn; a wrong key or value raises PalestraError."""
        flat: dict[str, Any] = {}
        for layer in layers:
            flat |= flatten(layer)
        nested: dict[str, Any] = {}
        for key, value in flat.items():
            if key in REMOVED_SETTINGS:
                raise SettingError(unknown_setting(key, ()))
            *path, name = key.split(".")
            inner = nested
            for section in path:
                below = inner.get(section)
                inner[section] = below = dict(below) if isinstance(below, dict) else {}
                inner = below
            inner[name] = value
        try:
            return cls.model_validate(nested)
        except ValidationError as error:
            raise SettingError(explain(error, list(cls.keys()))) from None

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
                    raise SettingError(f"{key} = {value!r} has no effect here: {why}; leave it at {default!r}")

    def value(self, key: str) -> Any:
        return reduce(getattr, key.split("."), self)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Every dotted key with its one-line description."""
        return {key: info.description or "" for key, info in cls.settings().items()}

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        settings: dict[str, FieldInfo] = {}
        for name, info in cls.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                settings |= {f"{name}.{key}": inner for key, inner in info.annotation.model_fields.items()}
            else:
                settings[name] = info
        return settings


# the sections that extras declare; an extra whose folder is missing has none
EXTRA_SECTIONS: dict[str, type[Section]] = {
    name: extras.load(place, f"the setting {name}.*")
    for name, place in extras.SETTINGS.items()
    if extras.has_settings(name)
}
if TYPE_CHECKING:

    class RunConfig(_CoreConfig):
        """All settings: those of the core, and those of extras."""

        distill: Any = None
        vllm: Any = None
        tinker: Any = None
        ray: Any = None

else:
    _more = {name: (section, Field(default_factory=section)) for name, section in EXTRA_SECTIONS.items()}
    RunConfig = create_model("RunConfig", __base__=_CoreConfig, __module__=__name__, **_more)


def explain(error: ValidationError, known: list[str]) -> str:
    """Pydantic's errors, one a line, with the keys of the command line."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(unknown_setting(key, known))
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            lines.append(f"{key}: {message}{got}")
    return "\n".join(lines)


class RemovedSetting(NamedTuple):
    """A setting that no longer exists. `instead` completes "train.x was removed: …"."""

    default: Any
    instead: str
    last_version: str = "0.2.0"


# By dotted key. A stored run that has the default still loads; any other value names the last version that had it.
REMOVED_SETTINGS: dict[str, RemovedSetting] = {
    "agent.fork_server": RemovedSetting(False, "each attempt starts its program; leave it out"),
    "env.isolation": RemovedSetting("auto", "the sandbox always uses namespaces of the Linux kernel; leave it out"),
    "env.container_image": RemovedSetting(
        "docker.io/library/python:3.11-slim", "the sandbox uses namespaces instead of containers; leave it out"
    ),
    "train.replay": RemovedSetting(0.0, "learn from successes in an rft stage before grpo: stages.plan = rft,grpo"),
}


def unknown_setting(key: str, known: Iterable[str]) -> str:
    """The error message for a key that is not a setting: what replaced it, or the closest known key."""
    if removed := REMOVED_SETTINGS.get(key):
        return f"{key} was removed: {removed.instead}"
    section = key.partition(".")[0]
    if section in extras.SETTINGS and not extras.has_settings(section):
        return extras.missing(extras.SETTINGS[section].partition(".")[0], key)
    return f"unknown setting {key!r}.{did_you_mean(key, known)}"


def without_removed(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a stored run, by dotted key, without removed ones that had their default."""
    removed = {key: value for key, value in settings.items() if key in REMOVED_SETTINGS}
    for key, value in removed.items():
        default, instead, version = REMOVED_SETTINGS[key]
        if value != default:
            raise SettingError(
                f"{where} has {key} = {value!r}; the last version that had it is {version}. In this version, {instead}"
            )
    if removed:
        _warn_once(where, ", ".join(removed))
    elsewhere = [name for name in extras.SETTINGS if not extras.has_settings(name)]  # sections of missing extras
    return {k: v for k, v in settings.items() if k not in removed and k.partition(".")[0] not in elsewhere}


@lru_cache(maxsize=1024)
def _warn_once(where: str, keys: str) -> None:
    """Warn the first time: the dashboard reads a run's settings with every request."""
    log.warning("%s: ignoring removed settings at their defaults: %s", where, keys)


MAX_YAML_NODES = 100_000
MAX_YAML_DEPTH = 100

# Settings under names that users of other trainers know -> the same setting here.
TRANSLATIONS = {
    "model.base_model_name": "model.name",
    "model.max_new_tokens": "rollout.max_new_tokens",
    "rl.training.per_device_train_batch_size": "train.problems_per_step",
    "rl.training.learning_rate": "train.learning_rate",
    "rl.training.num_train_epochs": "train.epochs",
    "rl.training.max_steps": "train.max_steps",
    "rl.generation.num_generations": "rollout.group_size",
    "rl.generation.temperature": "rollout.temperature",
    "rl.generation.top_p": "rollout.top_p",
    "wandb.enabled": "track.report_to",
    "wandb.project": "track.project",
    "wandb.entity": "track.entity",
}


def read_yaml_config(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, by their dotted names, ready for `RunConfig.build`."""
    return translate(flatten(load_yaml(path)), str(path))


def load_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file as they are."""
    import yaml

    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"there is no config file {path}; `palestra config my_agent.py` prints one") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableFileError(f"the config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UnreadableFileError(f"the config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is not None and not isinstance(data, dict):
        raise SettingError(f"the config file {path} holds a {type(data).__name__}; expected sections such as 'train:'")
    return data or {}


def parse_yaml(text: str) -> Any:
    """A YAML document; yaml.YAMLError if it is nested too deeply, expands too far by aliases or repeats a key."""
    import yaml

    steps = ((char in "[{") - (char in "]}") for char in re.sub(r"[^][{}]+", "", text))
    if max(accumulate(steps), default=0) > MAX_YAML_DEPTH:  # PyYAML takes seconds to find that out
        raise yaml.YAMLError(f"it is nested more than {MAX_YAML_DEPTH} levels deep")
    sizes: dict[int, int] = {}  # expanded nodes, by node; a node that is being counted is absent

    def size(node: Any, path: frozenset[int]) -> int:
        if id(node) in path:
            raise yaml.YAMLError("an alias refers to the node that contains it")
        if id(node) not in sizes:
            if isinstance(node, yaml.MappingNode):
                _refuse_repeated_keys(node)
            pairs = node.value if isinstance(node, yaml.CollectionNode) else []
            below = [part for pair in pairs for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(size(part, path | {id(node)}) for part in below)
            if sizes[id(node)] > MAX_YAML_NODES:
                raise yaml.YAMLError(f"with its aliases expanded, it has more than {MAX_YAML_NODES} nodes")
        return sizes[id(node)]

    if (root := yaml.compose(text, yaml.SafeLoader)) is not None:
        size(root, frozenset())
    return yaml.safe_load(text)


def _refuse_repeated_keys(node: Any) -> None:
    """PyYAML takes the last of two keys that are the same, and drops what the first one held."""
    import yaml

    lines: dict[str, int] = {}
    for key in (k for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != "<<"):
        line = key.start_mark.line + 1
        if key.value in lines:
            raise yaml.YAMLError(f"{key.value!r} is there twice, in lines {lines[key.value]} and {line}; make it one")
        lines[key.value] = line


def flatten(data: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names; a section without content counts for nothing.

    >>> flatten({"train": {"learning_rate": 2e-5}, "lora.r": 8, "echo": None})
    {'train.learning_rate': 2e-05, 'lora.r': 8}
    """
    known = (*RunConfig.keys(), *TRANSLATIONS)
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        settings = {}
        if isinstance(value, Mapping) and key not in known:  # a setting may be an object itself
            settings = flatten(value, f"{key}.")
        elif value is not None or not any(k.startswith(f"{key}.") for k in known):
            settings = {key: value}
        if twice := sorted(flat.keys() & settings):
            raise SettingError(f"{twice[0]} is given twice, in its section and by its dotted name; keep one of them")
        flat |= settings
    return flat


def translate(flat: dict[str, Any], where: str) -> dict[str, Any]:
    """Other trainers' names into ours; unknown names, and one setting given under two names, are refused."""
    known = [*RunConfig.keys(), *TRANSLATIONS]
    for key, value in flat.items():
        if any(k.startswith(f"{key}.") for k in known):
            raise SettingError(
                f"{where}: {key!r} is {value!r}; it is a section, with settings such as "
                f"{next(k for k in known if k.startswith(f'{key}.'))}"
            )
        if key not in known:
            raise SettingError(f"{where}: {unknown_setting(key, known)}")
    out: dict[str, Any] = {}
    for key, value in flat.items():
        name = TRANSLATIONS.get(key, key)
        if name in out:
            twice = " and ".join(k for k in flat if TRANSLATIONS.get(k, k) == name)
            raise SettingError(f"{where}: {twice} are one setting; keep one of them")
        if key == "wandb.enabled":
            if not isinstance(value, bool):
                raise SettingError(f"{where}: wandb.enabled is {value!r}; expected true or false")
            value = ["wandb"] if value else []
        out[name] = value
    return out
