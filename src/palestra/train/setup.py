"""From a config to the parts that a run is made of, in the open."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.core.config import RolloutSection, RunConfig
from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams
from palestra.learner.lora import add_lora, quantization_config
from palestra.models.loading import LoadedModel, load_model
from palestra.policy.base import Policy
from palestra.policy.build import build_policy
from palestra.policy.remote import RemotePolicy
from palestra.rollout.agent_loop import AttemptLimits

log = logging.getLogger("palestra")


def seed_everything(seed: int) -> None:
    """Seed every library's generator. Sampling has its own seeds; this is for initialisation and dropout."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_for_run(config: RunConfig) -> LoadedModel:
    """The model of a run, quantised where asked for, with every generator seeded first."""
    seed_everything(config.seed)
    return load_model(
        config.model.name,
        dtype=config.model.dtype,
        device=config.model.device,
        quantization=quantization_config(config.lora),
    )


def with_adapter(model: Any, config: RunConfig) -> Any:
    """The model with fresh LoRA adapters where the config asks for them and it has none yet."""
    return add_lora(model, config.lora) if config.lora.r and not hasattr(model, "disable_adapter") else model


def policy_for(model: Any, tokenizer: Any, config: RunConfig) -> Policy[Any]:
    """What a run samples with: the model in this process, or a server that is given its weights after each step."""
    if config.rollout.policy_url is None:
        return build_policy(model, tokenizer, config.model.engine, config.model.kv_memory_gib)
    if config.lora.r:
        raise PalestraError(
            "rollout.policy_url serves whole weights, and lora.r trains an adapter; set lora.r to 0, or leave it out"
        )
    token, folder = os.environ.get("PALESTRA_TOKEN"), Path(config.rollout.weights_folder)
    return RemotePolicy(config.rollout.policy_url, token=token, weights_folder=folder)


def sampling_params(options: RolloutSection, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How a turn is sampled in training; settings that bias the importance ratio are warned of."""
    if options.top_p < 1 or options.top_k or options.min_p or options.repetition_penalty != 1:
        log.warning(
            "top_p, top_k, min_p or repetition_penalty during training bias the importance ratio; prefer the defaults"
        )
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_token_ids=stop_token_ids,
    )


def train_limits(config: RunConfig, stop_token_ids: tuple[int, ...] = ()) -> AttemptLimits:
    """How attempts are sampled for training."""
    options = config.rollout
    sampling = sampling_params(options, stop_token_ids)
    return AttemptLimits(sampling, options.max_tool_rounds, options.tool_timeout_s, options.constrain_tool_calls)


def eval_limits(limits: AttemptLimits, config: RunConfig) -> AttemptLimits:
    """The same for evaluation: at its own temperature, from the whole distribution."""
    sampling = replace(limits.sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    return replace(limits, sampling=sampling)
