"""The limits of an attempt by a run's config. Without torch: attempts at an endpoint need none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from palestra.core.config import RunConfig
from palestra.core.config_sections import RolloutSection
from palestra.core.types import SamplingParams
from palestra.rollout.agent_loop import AttemptLimits

log = logging.getLogger("palestra")
DESTRUCTIVE_RATE = 30  # times the learning rate that suits a model


def sampling_params(options: RolloutSection, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How a turn is sampled in training; settings that bias the importance ratio are warned of."""
    if options.repetition_penalty != 1:
        log.warning("repetition_penalty during training biases the importance ratio; prefer 1")
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_token_ids=stop_token_ids,
    )


def attempt_limits(config: RunConfig, stop_token_ids: tuple[int, ...] = (), *, training: bool) -> AttemptLimits:
    """How attempts are sampled: for an evaluation at its own temperature, from the whole distribution."""
    config = config.with_step_size()
    options, sampling = config.rollout, sampling_params(config.rollout, stop_token_ids)
    if not training:
        sampling = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    return AttemptLimits(
        sampling,
        max_tool_rounds=options.max_tool_rounds,
        tool_timeout_s=options.tool_timeout_s,
        max_tool_result_chars=options.max_tool_result_chars,
        constrain_tool_calls=options.constrain_tool_calls,
        unexpected_call_format=options.unexpected_call_format,
        compact_at=options.compact_at,
        keep_reasoning=options.keep_reasoning,
    )


def setting_warnings(config: RunConfig, parameters: int, context_tokens: int) -> Iterator[str]:
    """Warn of settings that are valid but probably a mistake for a model of this size and context."""
    suited = config.default_learning_rate(parameters)
    rate = config.train.learning_rate
    if rate is not None and rate > suited * DESTRUCTIVE_RATE:
        yield (
            f"train.learning_rate = {rate:g} is {rate / suited:.0f} times the {suited:g} that suits this model, and "
            "likely to destroy it; leave it out, or use less"
        )
    limit = config.rollout.max_new_tokens
    if limit is not None and limit >= context_tokens:
        yield (
            f"rollout.max_new_tokens = {limit} does not fit the model's context of {context_tokens} tokens, prompt "
            "included; rollouts end where the context is full"
        )
