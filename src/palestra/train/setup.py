"""From a config to the parts that a run is made of."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.extras import provided
from palestra.learner.lora import add_lora, quantization_config
from palestra.models.loading import (
    LoadedModel,
    device_named,
    dtype_named,
    load_config,
    load_model,
    load_tokenizer,
    set_template_variables,
)
from palestra.policy.base import Policy
from palestra.policy.build import build_policy
from palestra.policy.local import sampling_copy
from palestra.policy.remote import RemotePolicy
from palestra.runs.limits import count_gpus, require_gpus
from palestra.train.forecast import kv_memory_for, parameter_count, refuse_what_cannot_fit, with_step_size
from palestra.train.ranks import join


def load_for_run(config: RunConfig, *, training: bool = True) -> LoadedModel:
    """The model of a run, quantised where asked for, with every generator seeded first; the tokenizer alone where the
    backend has the model elsewhere. `training`: memory for a training must be there, not only for sampling."""
    for seed in (
        random.seed,
        np.random.seed,
        torch.manual_seed,
    ):  # for initialisation and dropout: sampling has its own
        seed(config.seed)
    ranks = join(config)
    if config.backend != "local":
        backend = provided(f"backend: {config.backend}")
        backend.require(config)
        if not backend.LOADS_MODEL:
            tokenizer = load_tokenizer(config.model.name)
            set_template_variables(tokenizer, config.model.chat_template_kwargs)
            return LoadedModel(None, tokenizer, config.model.name, "")
    require_gpus(config.model.gpus, count_gpus())
    device = device_named(config.model.device) if ranks.size == 1 else ranks.device
    if device.type == "cuda":
        refuse_what_cannot_fit(config, load_config(config.model.name), device, training=training)
    loaded = load_model(
        config.model.name,
        dtype=config.model.dtype,
        device=str(device),
        quantization=quantization_config(config.lora, dtype_named(config.model.dtype, device)),
        threads=config.model.threads,
    )
    set_template_variables(loaded.tokenizer, config.model.chat_template_kwargs)
    return loaded


def use_threads(threads: int | None, config: RunConfig) -> None:
    """Go on with as many CPU threads as a run began with: their sums differ in the last bits."""
    if threads is not None and config.model.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)


def suited_to(
    config: RunConfig, model: Any, *, max_problems: int | None = None, max_group: int | None = None
) -> RunConfig:
    """The config with all that it leaves to the run: learning rate and sizes of a step, by model and device."""
    config = config.with_learning_rate(parameter_count(model))
    device, limits = next(model.parameters()).device, {"max_problems": max_problems, "max_group": max_group}
    return with_step_size(config, getattr(model, "config", None), device, **limits)


def with_adapter(model: Any, config: RunConfig) -> Any:
    """The model with fresh LoRA adapters where the config asks for them and it has none yet."""
    return add_lora(model, config.lora) if config.lora.r and not hasattr(model, "disable_adapter") else model


def samples_from_server(config: RunConfig) -> bool:
    """Whether a running server samples, so that its clients need no model of their own."""
    return config.vllm_mode == "server" or config.rollout.policy_url is not None


def policy_for(model: Any, tokenizer: Any, config: RunConfig) -> Policy[Any]:
    """What a run samples with: the model in this process, or a server that is given its weights after each step."""
    if config.vllm_mode != "off":
        return provided("vllm.mode")(model, tokenizer, config)
    if config.rollout.policy_url is None:
        # sampling goes on while the learner changes its weights: by a module of its own, at the last version
        sampled = sampling_copy(model) if config.rollout.max_staleness else model
        options: dict[str, Any] = {
            "kv_memory_gib": kv_memory_for(config, model),
            "waits_for_all_tools": config.train.deterministic,
            "exact": config.model.exact,
            "record_routing": config.train.expert_routing != "own",
        }
        return build_policy(sampled, tokenizer, config.model.engine, **options)
    if config.lora.r:
        raise SettingError(
            "rollout.policy_url serves whole weights, and lora.r trains an adapter; set lora.r to 0, or leave it out"
        )
    token, folder = os.environ.get("PALESTRA_TOKEN"), Path(config.rollout.weights_folder)
    return RemotePolicy(config.rollout.policy_url, token=token, weights_folder=folder)
