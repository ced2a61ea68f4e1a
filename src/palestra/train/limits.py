"""The limits of an attempt by a run's config. Without torch: attempts at an endpoint need none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.config_sections import RolloutSection
from palestra.core.types import SamplingParams
from palestra.rollout.agent_loop import AttemptLimits

log = logging.getLogger("palestra")
DESTRUCTIVE_RATE = 30  # times the learning rate that suits a model


def attempt_limits(config: RunConfig, stop_token_ids: tuple[int, ...] = (), *, training: bool) -> AttemptLimits:
    """How attempts are sampled: for an evaluation at its own temperature, from the whole distribution."""
    options = config.with_step_size().rollout
    if options.repetition_penalty != 1:
        log.warning("repetition_penalty during training biases the importance ratio; prefer 1")
    sampling = SamplingParams(stop_token_ids=stop_token_ids, **_settings(options, SamplingParams))
    if not training:
        sampling = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    return AttemptLimits(sampling, **_settings(options, AttemptLimits))


def _settings(options: RolloutSection, kind: type) -> dict[str, Any]:
    """The settings that are fields of a dataclass, by their names."""
    return {f.name: getattr(options, f.name) for f in fields(kind) if f.name in type(options).model_fields}


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
