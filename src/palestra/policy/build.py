"""The policy for a model in this process."""

from __future__ import annotations

import logging
from typing import Any

from palestra.core.config_sections import ModelSection
from palestra.core.errors import UnsupportedModel
from palestra.policy.base import Policy

log = logging.getLogger("palestra")


def build_policy(
    model: Any,
    tokenizer: Any,
    engine: str,
    kv_memory_gib: float | None = None,
    *,
    exact: bool = False,
    record_routing: bool = False,
    **options: bool,
) -> Policy[Any]:
    """The paged engine where the model allows it, naive batched sampling where not.

    `keep_closed`: conversations come back, each request with all that was said before (see `Engine`).
    `exact`: its logprobs are those of the learner, to the bit.
    `record_routing`: turns say which experts computed their tokens; UnsupportedModel if the model has none.
    `waits_for_all_tools`: who shares a batch never depends on how long tools take (see `ToolBarrier`).
    """
    from palestra.policy.local import LocalPolicy
    from palestra.policy.naive import NaivePolicy

    if engine == "plain":
        return NaivePolicy(model, tokenizer)
    try:
        options |= {"exact": exact, "record_routing": record_routing}
        return LocalPolicy(model, tokenizer, kv_memory_gib=kv_memory_gib, **options)
    except UnsupportedModel as reason:
        if engine == "paged" or exact or record_routing:
            raise
        log.warning("%s; falling back to naive batched sampling (slower)", reason)
        return NaivePolicy(model, tokenizer)


def policy_of(model: Any, tokenizer: Any, options: ModelSection, *, record_routing: bool = False) -> Policy[Any]:
    """The policy by the settings of a run."""
    return build_policy(
        model, tokenizer, options.engine, options.kv_memory_gib, exact=options.exact, record_routing=record_routing
    )
