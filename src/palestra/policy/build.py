"""The policy for a model in this process."""

from __future__ import annotations

import logging
from typing import Any

from palestra.core.errors import UnsupportedModel
from palestra.policy.base import Policy

log = logging.getLogger("palestra")


def build_policy(
    model: Any, tokenizer: Any, engine: str, kv_memory_gib: float | None = None, keep_closed: bool = False
) -> Policy[Any]:
    """The paged engine where the model allows it, naive batched sampling where not.

    `keep_closed`: conversations come back, each request with all that was said before (see `Engine`).
    """
    from palestra.policy.local import LocalPolicy
    from palestra.policy.naive import NaivePolicy

    if engine == "plain":
        return NaivePolicy(model, tokenizer)
    try:
        return LocalPolicy(model, tokenizer, kv_memory_gib=kv_memory_gib, keep_closed=keep_closed)
    except UnsupportedModel as reason:
        if engine == "paged":
            raise
        log.warning("%s; falling back to naive batched sampling (slower)", reason)
        return NaivePolicy(model, tokenizer)
