"""Who decides each setting of a run: an agent with the rl_* tools, or only the site."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from palestra.core.errors import NotAllowedError

SettingClass = Literal["agent", "backend", "address", "folder", "model", "account", "code"]

# Who decides each setting of a run. An agent may edit the class "agent", and "model" where it names a model of the
# hub. All others decide where data, keys and weights go: they are locked unless the site file unlocks them.
# tests/extras/agent_tools/test_locks.py compares this table with all settings: a new setting needs a class.
SETTING_CLASSES: dict[SettingClass, tuple[str, ...]] = {
    "backend": ("backend", "vllm.mode"),
    "address": (
        "vllm.url", "rollout.policy_url", "tinker.base_url", "ray.address", "stages.teacher", "distill.teacher_url",
        "agent.roles",
    ),
    "folder": ("output_dir", "rollout.weights_folder", "stages.traces", "distill.teacher"),
    "code": ("train.custom_advantages", "train.custom_loss", "agent.sandbox"),
    "model": ("model.name",),
    "account": ("track.entity", "track.project"),
    "agent": (
        "seed", "model.chat_template_kwargs", "model.dtype", "model.device", "model.gpus", "model.threads",
        "model.gradient_checkpointing", "model.sleep_mode", "model.master_weights", "model.engine", "model.exact",
        "model.kv_memory_gib", "train.learning_rate", "train.epochs", "train.max_steps", "train.problems_per_step",
        "train.loss", "train.ratio", "train.epsilon", "train.epsilon_high", "train.delta", "train.sapo_temperature_pos",
        "train.sapo_temperature_neg", "train.beta", "train.kl_bias_correction", "train.importance_correction",
        "train.importance_cap", "train.importance_floor", "train.expert_routing", "train.off_policy_mask_threshold",
        "train.advantage_scale", "train.leave_one_out", "train.combine", "train.credit", "train.discount",
        "train.step_weight", "train.sampling", "train.sampling_half_life", "train.entropy_coefficient",
        "train.target_entropy", "train.iterations", "train.minibatches", "train.mask_truncated",
        "train.filter_equal_groups", "train.signal_share", "train.stop_when_solved", "train.max_sampled_tokens",
        "train.refill_limit", "train.full_update_share", "train.max_rollbacks", "train.max_grad_norm",
        "train.weight_decay", "train.adam_beta1", "train.adam_beta2", "train.scheduler", "train.warmup_steps",
        "train.tokens_per_micro_batch", "train.share_prefix", "train.deterministic", "rollout.group_size",
        "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.repetition_penalty",
        "rollout.max_new_tokens", "rollout.max_tool_rounds", "rollout.tool_timeout_s", "rollout.max_tool_result_chars",
        "rollout.max_open_episodes", "rollout.constrain_tool_calls", "rollout.unexpected_call_format",
        "rollout.compact_at", "rollout.keep_reasoning", "rollout.workers", "rollout.max_staleness", "agent.timeout_s",
        "agent.max_at_once", "agent.max_output_bytes", "agent.gateway_workers",
        "lora.r", "lora.alpha", "lora.dropout", "lora.target_modules", "lora.load_in_4bit", "vllm.timeout_s",
        "vllm.gpu_memory_utilization", "vllm.max_model_len", "vllm.tensor_parallel_size", "ray.actors",
        "ray.cpus_per_actor", "ray.gpus_per_actor", "ray.timeout_s", "ranks.timeout_s", "echo.coefficient",
        "echo.normalization", "echo.schedule", "echo.final_coefficient", "echo.step_every", "stages.plan",
        "stages.teacher_model", "stages.teacher_attempts", "stages.teacher_cases", "stages.sft_epochs",
        "stages.sft_batch", "stages.sft_learning_rate",
        "stages.rft_rounds", "stages.rft_attempts", "stages.rft_pass", "stages.rft_keep", "stages.rft_until",
        "stages.distill_steps", "stages.hints", "distill.coefficient", "distill.only", "distill.context",
        "distill.teacher_weights", "distill.divergence", "distill.top_k", "distill.phase_out", "eval.cases",
        "eval.samples_per_case", "eval.temperature", "eval.every", "checkpoint.every", "checkpoint.keep_last",
        "checkpoint.keep_best", "track.report_to", "track.run_name", "track.log_every",
        "track.rollouts_every", "track.tokens_every", "track.transcripts_every",
    ),
}  # fmt: skip
SITE_SETTINGS = [key for name, keys in SETTING_CLASSES.items() if name not in ("agent", "model") for key in keys]
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
