"""From a config to the parts of a run: its model, learner and policy, on this machine or through an extra's backend."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.extras import BACKENDS, provided
from palestra.core.ranks import ONE_PROCESS, Ranks, join
from palestra.learner.base import Learner
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora, quantization_config
from palestra.models.export.hf import save_hf, write_tokenizer_and_card
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


def load_for_run(config: RunConfig, *, training: bool = True) -> LoadedModel:
    """The model of a run, quantised where asked for, with every generator seeded first; the tokenizer alone where the
    backend has the model elsewhere. `training`: memory for a training must be there, not only for sampling."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # for initialisation and dropout, not for sampling
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
    """The policy of a run: the model in this process, or a server that gets its weights after each step."""
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


Record = Mapping[str, Any]  # of the run folder


@dataclass(frozen=True, slots=True)
class Backend:
    """Learner and policy of a run, and how its model is written to disk."""

    config: RunConfig  # suited to the model
    model: Any  # the module; None where it is not in this process
    tokenizer: Any
    learner: Learner
    policy: Policy[Any]
    complete_checkpoint: Callable[[Path, Record], None]  # makes what the learner saved a model: tokenizer, …
    save_model: Callable[[Path, Record], Path]
    close: Callable[[bool], None] = lambda good: None

    @property
    def context_tokens(self) -> int | None:
        """The model's context length; None if it is not known."""
        if self.policy.context_tokens is not None:
            return self.policy.context_tokens
        config = getattr(self.model, "config", None)
        return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)


def backend_of(
    config: RunConfig,
    loaded: LoadedModel,
    learner: Learner | None = None,
    policy: Policy[Any] | None = None,
    ranks: Ranks = ONE_PROCESS,
    *,
    max_problems: int | None = None,
    max_group: int | None = None,
) -> Backend:
    """The backend that the config names. Learner and policy share one module, unless others are given.

    `max_problems` and `max_group` bound the sizes of a step that the config leaves to the run.
    """
    for name in BACKENDS:
        if name != config.backend:
            config.refuse([name], f"it is for backend: {name}")
    if loaded.model is not None:
        config = suited_to(config, loaded.model, max_problems=max_problems, max_group=max_group)
    if config.backend != "local":
        return provided(f"backend: {config.backend}").open_backend(config, loaded)
    model, tokenizer = with_adapter(loaded.model, config), loaded.tokenizer
    return local_backend(config, model, tokenizer, policy or policy_for(model, tokenizer, config), learner, ranks)


def local_backend(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    policy: Policy[Any],
    learner: Learner | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Backend:
    """A backend that trains in this process."""
    kind = LocalLearner if ranks.size == 1 else partial(provided("learners of several ranks"), ranks=ranks)
    return Backend(
        config,
        model,
        tokenizer,
        learner or kind(model, config=config, pad_token_id=tokenizer.pad_token_id or 0),
        policy,
        lambda folder, record: write_tokenizer_and_card(model, tokenizer, folder, record),
        lambda folder, record: save_hf(model, tokenizer, folder, record=record),
        lambda good: policy.release(),
    )
