"""Who decides each setting of a run: an agent with the rl_* tools, or only the site. And the limits of a site.

Locks depend on the profile. A site file changes locks and limits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from palestra.core.config import RunConfig, explain, load_yaml, unknown_setting
from palestra.core.config_sections import Section
from palestra.core.errors import NotAllowedError, NotFoundError, PalestraError, UnreadableFileError, did_you_mean

# Settings that decide where data, keys and weights go. They are locked unless the site file unlocks them, except that
# an agent may name a "model" of the hub. An agent may edit all others: tests/extras/agent_tools/test_locks.py lists
# them, so that each new setting is put here or there.
SETTING_CLASSES = {
    "backend": ("backend", "vllm.mode"),
    "address": (
        "vllm.url", "rollout.policy_url", "tinker.base_url", "ray.address", "stages.teacher", "distill.teacher_url",
        "agent.roles",
    ),
    "folder": ("output_dir", "rollout.weights_folder", "stages.traces", "distill.teacher"),
    "code": ("train.custom_advantages", "train.custom_loss", "agent.sandbox"),
    "model": ("model.name",),
    "account": ("track.entity", "track.project"),
}  # fmt: skip
SITE_SETTINGS = [key for name, keys in SETTING_CLASSES.items() if name != "model" for key in keys]
# An address -> the key that is sent there, and the variable by which the owner of the key names a host.
KEYS_OF_ADDRESSES = {
    "tinker.base_url": ("TINKER_API_KEY", "TINKER_BASE_URL"),
    "vllm.url": ("VLLM_API_KEY", None),
    "rollout.policy_url": ("PALESTRA_TOKEN", None),
    "stages.teacher": ("PALESTRA_TEACHER_KEY", None),
}
AGENT_MAXIMUM = {"checkpoint.keep_last": 20.0}  # bounds disk space; `maximum` of the site file overrides it
_HUB_NAME = re.compile(r"\w[\w.-]{0,99}(/\w[\w.-]{0,99})?(:\w[\w.-]{0,99})?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Whether a model name can only mean a model of the hub, or one that comes with Palestra.

    >>> [is_hub_name(name) for name in ("Qwen/Qwen3-0.6B", "palestra/tiny", "/models/x", "../x", "a/b/c", "x.gguf")]
    [True, True, False, False, False, False]
    """
    return bool(_HUB_NAME.fullmatch(name)) and not name.endswith(".gguf") and not Path(name).exists()


def refuse_keys_for_unknown_hosts(
    edited: Mapping[str, Any], owned: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse an address that an agent chose and to which a key would be sent.

    A key goes to hosts that its owner names, in `owned` (the settings under `run:` of the site file) or in the
    environment.
    """
    roles, own_roles = (
        {f"PALESTRA_ROLE_KEY_{str(label).upper()}": (label, model) for label, model in (given or {}).items()}
        for given in (edited.get("agent.roles"), owned.get("agent.roles"))
    )
    rows = [(name, edited.get(name), key, owned.get(name), own) for name, (key, own) in KEYS_OF_ADDRESSES.items()]
    rows += [  # the endpoints of a program's agents, each of which has a key of its own
        (f"agent.roles: {label}", model, key, own_roles.get(key, (label, None))[1], None)
        for key, (label, model) in roles.items()
        if "://" in str(model)
    ]
    for name, address, key, owner, variable in rows:
        hosts = [owner, environ.get(variable) if variable else None]
        if address is None or not environ.get(key) or _origin(str(address)) in [_origin(str(h)) for h in hosts if h]:
            continue
        raise NotAllowedError(
            f"{name} = {address!r} would get {key}, which is sent to hosts of its owner's choice only; "
            f"the owner names them under run: in the site file{f', or as {variable}' if variable else ''}"
        )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of a URL; a URL that cannot be read equals no other."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port
    except ValueError:
        return "", url, None


SITE_VARIABLE = "PALESTRA_SITE"
SITE_FILE = "palestra.yaml"
CHOSEN_AT_START = "chosen at start"  # a free loopback port, a folder in the run
THE_MODEL = "the model's"  # follows model.name
LockSection = Literal["env", "server", "trainer", "run"]
_MODEL = "Qwen/Qwen3-8B"
_WORKERS = 16 * (os.cpu_count() or 1)


@dataclass(frozen=True)
class Profiled:
    """The setting of RunConfig that a lock sets, and its value by profile; None: the profile leaves it to the agent."""

    setting: str | None = None
    local: Any = None
    tinker: Any = None


def _field(description: str, setting: str | None = None, local: Any = None, tinker: Any = None, **bounds: Any) -> Any:
    info = Field(None, description=description, **bounds)
    info.metadata.append(Profiled(setting, local, tinker))
    return info


class EnvLocks(Section):
    """Infrastructure settings of an environment."""

    allow_unsandboxed: bool | None = _field("run the model's code even without isolation", None, False, False)
    tokenizer_name: str | None = _field("the tokenizer that counts tokens", None, THE_MODEL, _MODEL)
    rollout_server_url: str | None = _field("the URL of the trajectory API", None, CHOSEN_AT_START, CHOSEN_AT_START)
    use_wandb: bool | None = _field("metrics go to Weights & Biases too", "track.report_to", tinker=True)
    max_token_length: int | None = _field("tokens of one rollout", "rollout.max_new_tokens", tinker=8192, ge=1)
    max_num_workers: int | None = _field("concurrent rollouts", None, _WORKERS, 2048, ge=1)
    worker_timeout: int | None = _field("seconds that one rollout may take", None, 3600, 3600, ge=1)
    total_steps: int | None = _field("optimizer steps of a run", "train.max_steps", tinker=2500, ge=1)
    steps_per_eval: int | None = _field(
        "steps between evaluations; 0 only before and after", "eval.every", tinker=25, ge=0
    )
    max_batches_offpolicy: int | None = _field(
        "batches that an Atropos environment may be ahead of the trainer", tinker=3, ge=0
    )
    inference_weight: float | None = _field("this environment's share among several", tinker=1.0, gt=0)
    eval_limit_ratio: float | None = _field("share of the workers that evaluation may use", tinker=0.1, gt=0)


class ServerLocks(Section):
    """The inference server that an environment samples from."""

    model_name: str | None = _field("the model that is trained and served", "model.name", THE_MODEL, _MODEL)
    base_url: str | None = _field("the URL at which it is served", None, CHOSEN_AT_START, CHOSEN_AT_START)
    weight: float | None = _field("its share among several servers", None, 1.0, 1.0, gt=0)
    num_requests_for_eval: int | None = _field("concurrent evaluation requests", None, min(256, _WORKERS), 256, ge=1)
    timeout: int | None = _field("seconds that one answer may take", None, 3600, 3600, ge=1)
    server_type: Literal["sglang", "vllm", "openai"] | None = _field("the API that it speaks", None, "sglang", "sglang")


class TrainerLocks(Section):
    """The trainer."""

    lora_rank: int | None = _field("rank of the adapter; 0 trains all weights", "lora.r", tinker=32, ge=0)
    learning_rate: float | None = _field("learning rate of the optimizer", "train.learning_rate", tinker=4e-5, gt=0)
    max_token_trainer_length: int | None = _field(
        "tokens of one forward and backward", "train.tokens_per_micro_batch", tinker=9000, ge=1
    )
    checkpoint_dir: str | None = _field("folder of the checkpoints", "output_dir", CHOSEN_AT_START, CHOSEN_AT_START)
    save_checkpoint_interval: int | None = _field("steps between checkpoints", "checkpoint.every", tinker=25, ge=0)


class RequestLimits(Section):
    """The limits of an agent's requests."""

    status_check_minutes: float = Field(
        30.0, ge=0, description="minutes between two status checks of a run whose state has not changed"
    )
    config_minutes: float = Field(3.0, gt=0, description="minutes for reading the config of an environment")
    active_runs: int = Field(20, ge=1, description="runs that are running or queued")
    test_completions: int = Field(2048, ge=2, description="num_steps × group_size of one model in rl_test_inference")
    test_models: int = Field(16, ge=1, description="models in one rl_test_inference")
    test_minutes: float = Field(10.0, gt=0, description="minutes for one model in rl_test_inference")
    test_models_at_once: int = Field(4, ge=1, description="models that are tested concurrently")
    test_requests_at_once: int = Field(16, ge=1, description="concurrent requests for one tested model")


class Inference(Section):
    """The endpoint of rl_test_inference, if OPENROUTER_API_KEY and OPENAI_BASE_URL are not set."""

    base_url: str | None = Field(None, description="an OpenAI-style endpoint, up to and including /v1")
    api_key_env: str = Field("OPENAI_API_KEY", description="the environment variable that holds its key")
    models: list[str] = Field(default_factory=list, description="tested when none are named")


class Site(Section):
    """The site file, palestra.yaml: the profile, further locks, locks of the profile that are lifted, and limits."""

    profile: Literal["local", "tinker"] = "local"
    env: EnvLocks = Field(default_factory=EnvLocks)
    server: ServerLocks = Field(default_factory=ServerLocks)
    trainer: TrainerLocks = Field(default_factory=TrainerLocks)
    run: dict[str, Any] = Field(default_factory=dict, description="any setting of a run, by its dotted name")
    unlock: list[str] = Field(default_factory=list, description="locks of the profile that are lifted")
    maximum: dict[str, float] = Field(default_factory=dict, description="the largest value of a setting of a run")
    limits: RequestLimits = Field(default_factory=RequestLimits)
    inference: Inference = Field(default_factory=Inference)

    @field_validator("run", "maximum", "unlock")
    @classmethod
    def _known(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse unknown names, maximums of what is not a number, and values that no run accepts."""
        settings, locks = RunConfig.settings(), [*_LOCKS, *SITE_SETTINGS, *SETTING_CLASSES["model"]]
        for key in given:
            if info.field_name == "unlock" and key not in locks:
                raise ValueError(f"there is no lock {key!r}.{did_you_mean(key, locks)}")
            if info.field_name != "unlock" and key not in settings:
                raise ValueError(unknown_setting(key, settings))
            if info.field_name == "maximum" and not re.search("int|float", type_name(settings[key].annotation)):
                raise ValueError(f"{key} is not a number, so it has no maximum; lock it under run: instead")
        try:
            RunConfig().with_settings(given if info.field_name == "run" else {})
        except PalestraError as error:
            raise ValueError(str(error)) from None
        return given

    @property
    def maximums(self) -> dict[str, float]:
        """The largest values that an agent may choose, by setting."""
        return AGENT_MAXIMUM | self.maximum

    @model_validator(mode="after")
    def _one_backend(self) -> Site:
        """The profile `tinker` decides the backend; a second, different one would have no effect."""
        if self.profile == "tinker" and ("backend" in self.unlock or self.run.get("backend", "tinker") != "tinker"):
            raise ValueError("profile: tinker trains on a Tinker server; leave backend out of run and unlock")
        return self


@dataclass(frozen=True)
class Lock:
    """One setting that only the site decides. `setting` is the setting of RunConfig that it sets, if there is one."""

    section: LockSection
    name: str
    value: Any
    type: str
    description: str
    setting: str | None
    imposed: bool = True  # False: the setting stays as the environment or its default has it

    @property
    def full_name(self) -> str:
        return self.name if self.section == "run" else f"{self.section}.{self.name}"

    @property
    def is_open(self) -> bool:
        """Its value is only known when the run starts, or depends on another setting."""
        return self.value in (CHOSEN_AT_START, THE_MODEL)


_SECTIONS: dict[str, type[Section]] = {"env": EnvLocks, "server": ServerLocks, "trainer": TrainerLocks}
_LOCKS: dict[str, Profiled] = {
    f"{section}.{name}": next(each for each in info.metadata if isinstance(each, Profiled))
    for section, model in _SECTIONS.items()
    for name, info in model.model_fields.items()
}


# what other trainers call settings of a run, each with our key
SHORT_NAMES = {key.partition(".")[2]: lock.setting for key, lock in _LOCKS.items() if lock.setting} | {
    "group_size": "rollout.group_size", "batch_size": "train.problems_per_step", "wandb_project": "track.project",
}  # fmt: skip


def lifted_locks(site: Site) -> list[Lock]:
    """The profile's locks that do not hold at this site, with the values that they would have had."""
    return [_lock(key, value) for key, value in _profile(site).items() if key in site.unlock]


def _profile(site: Site) -> dict[str, Any]:
    values = {key: getattr(lock, site.profile) for key, lock in _LOCKS.items()}
    return {key: value for key, value in values.items() if value is not None}


def locks_of(site: Site) -> list[Lock]:
    """All locks: the profile's, then the site's own, then the settings that only a site decides."""
    values = _profile(site)
    for section in _SECTIONS:
        own = getattr(site, section).model_dump(exclude_none=True)
        values |= {f"{section}.{name}": value for name, value in own.items()}
    locks = [_lock(key, value) for key, value in values.items() if key not in site.unlock]
    taken = {lock.setting for lock in locks if not lock.is_open}
    imposed = {"backend": "tinker"} if site.profile == "tinker" else {}
    locks += [_run_lock(key, value) for key, value in (imposed | site.run).items() if key not in taken]
    decided = {lock.setting for lock in locks} | {(key in _LOCKS and _LOCKS[key].setting) or key for key in site.unlock}
    defaults = RunConfig()
    return locks + [_run_lock(key, defaults.value(key), False) for key in SITE_SETTINGS if key not in decided]


def _run_lock(key: str, value: Any, imposed: bool = True) -> Lock:
    info = RunConfig.settings()[key]
    return Lock("run", key, value, type_name(info.annotation), info.description or "", key, imposed)


def _lock(key: str, value: Any) -> Lock:
    section, _, name = key.partition(".")
    info = _SECTIONS[section].model_fields[name]
    kind = type_name(info.annotation).removesuffix(" | None")
    return Lock(section, name, value, kind, info.description or "", _LOCKS[key].setting)  # type: ignore[arg-type]


def locked_settings(locks: Sequence[Lock]) -> dict[str, Any]:
    """The settings of RunConfig that are locked, with their values."""
    by_setting = {lock.setting: lock for lock in locks if lock.setting and not lock.is_open and lock.imposed}
    return {key: as_setting(key, lock.value) for key, lock in by_setting.items()}


def as_setting(key: str, value: Any) -> Any:
    """A value as our setting takes it: `use_wandb: true` is a tracker."""
    if key == "track.report_to" and isinstance(value, bool):
        return ["wandb"] if value else []
    return value


def type_name(kind: Any) -> str:
    """A type as text: `int`, `float | None`, `'a' | 'b'`."""
    if isinstance(kind, type):
        return kind.__name__
    text = str(kind).replace("typing.", "").replace("NoneType", "None")
    return text.replace("Literal[", "one of [") if "Literal[" in text else text


def load_site(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Site:
    """The site file: `path`, the one that PALESTRA_SITE names, ./palestra.yaml, or the defaults."""
    named = path or environ.get(SITE_VARIABLE)
    file = Path(named or SITE_FILE)
    if not file.is_file():
        if not named:
            return Site()
        raise NotFoundError(f"there is no site file {file}; {SITE_VARIABLE} names it; write or unset it")
    sections = load_yaml(file)
    try:
        return Site.model_validate({key: value for key, value in sections.items() if value is not None})
    except ValidationError as error:
        nested: dict[str, type[Section]] = {**_SECTIONS, "limits": RequestLimits, "inference": Inference}
        below = [f"{section}.{name}" for section, model in nested.items() for name in model.model_fields]
        raise UnreadableFileError(f"the site file {file}: {explain(error, [*Site.model_fields, *below])}") from None
