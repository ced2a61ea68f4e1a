"""From a config and an environment to the parts that the loop drives, in the open."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from palestra.chat.template import ChatFormat
from palestra.core.config import RolloutSection, RunConfig
from palestra.core.errors import NotYetError
from palestra.core.types import SamplingParams
from palestra.envs.base import Environment
from palestra.policy.base import Policy
from palestra.rollout.collect import Collector, RewardFunction
from palestra.rollout.run import Limits

log = logging.getLogger("palestra")


def seed_everything(seed: int) -> None:
    """Seed every library's generator. Sampling has its own seeds; this is for initialisation and dropout."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_policy(model: Any, tokenizer: Any, engine: str, kv_memory_gib: float | None = None) -> Policy[Any]:
    """The paged engine where the model allows it, plain batched sampling where not."""
    from palestra.engine.attention import UnsupportedModel
    from palestra.policy.local import LocalPolicy
    from palestra.policy.naive import PlainPolicy

    if engine == "plain":
        return PlainPolicy(model, tokenizer)
    try:
        return LocalPolicy(model, tokenizer, kv_memory_gib=kv_memory_gib)
    except UnsupportedModel as reason:
        if engine == "paged":
            raise
        log.warning("%s; sampling falls back to the plain, slower way", reason)
        return PlainPolicy(model, tokenizer)


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


def build_collectors(
    environment: Environment,
    policy: Policy[Any],
    chat: ChatFormat,
    config: RunConfig,
    reward_functions: Sequence[RewardFunction] = (),
) -> tuple[Collector, Collector]:
    """One collector that samples for training, one that samples for evaluation."""
    options = config.rollout
    if options.max_staleness:
        raise NotYetError("rollout.max_staleness > 0 (asynchronous training) is not built yet; leave it at 0")
    sampling = sampling_params(options, chat.stop_token_ids)
    grammars = chat.call_grammars if options.constrain_tool_calls else None
    limits = Limits(sampling, options.max_tool_rounds, options.tool_timeout_s, grammars)
    calm = replace(
        limits, sampling=replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    )
    train = Collector(environment, policy, chat, limits, tuple(reward_functions))
    return train, replace(train, limits=calm, reward_functions=())
