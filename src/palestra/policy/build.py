"""The policy for a model in this process."""

from __future__ import annotations

import logging
from typing import Any

from palestra.core.errors import UnsupportedModel
from palestra.policy.base import Policy

log = logging.getLogger("palestra")


def build_policy(
    model: Any,
    tokenizer: Any,
    engine: str,
    kv_memory_gib: float | None = None,
    keep_closed: bool = False,
    waits_for_all_tools: bool = False,
    exact: bool = False,
) -> Policy[Any]:
    """The paged engine where the model allows it, naive batched sampling where not.

    `keep_closed`: conversations come back, each request with all that was said before (see `Engine`).
    `exact`: its logprobs are those of the learner, to the bit.
    `waits_for_all_tools`: who shares a batch never depends on how long tools take (see `ToolBarrier`).
    """
    from palestra.policy.local import LocalPolicy
    from palestra.policy.naive import NaivePolicy

    if engine == "plain":
        return NaivePolicy(model, tokenizer)
    try:
        options: dict[str, Any] = {"kv_memory_gib": kv_memory_gib, "keep_closed": keep_closed, "exact": exact}
        return LocalPolicy(model, tokenizer, waits_for_all_tools=waits_for_all_tools, **options)
    except UnsupportedModel as reason:
        if engine == "paged" or exact:
            raise
        log.warning("%s; falling back to naive batched sampling (slower)", reason)
        return NaivePolicy(model, tokenizer)
