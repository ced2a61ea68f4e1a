"""Completers of loaded models."""

from __future__ import annotations

from functools import partial
from typing import Any

from palestra.models.loading import LoadedModel, load_model
from palestra.policy.base import Policy
from palestra.policy.build import build_policy
from palestra.policy.local import token_logprobs
from palestra.servers.openai.completer import Completer


def load_completer(name: str, *, dtype: str = "auto", device: str = "auto", engine: str = "auto") -> Completer:
    """Load a model by any accepted name, ready to be served."""
    loaded = load_model(name, dtype=dtype, device=device)
    completer = completer_of(loaded, build_policy(loaded.model, loaded.tokenizer, engine, keep_closed=True))
    completer.check_tool_calls()
    return completer


def completer_of(loaded: LoadedModel, policy: Policy[Any], context_tokens: int | None = None) -> Completer:
    """The completer of a loaded model.

    Pass `context_tokens` for a model on another machine, which only returns the logprobs of its samples.
    """
    if context_tokens is not None:
        return Completer(policy, loaded.tokenizer, loaded.name, context_tokens, None, len(loaded.tokenizer))
    score = partial(token_logprobs, loaded.model)
    return Completer(policy, loaded.tokenizer, loaded.name, loaded.context_tokens, score, loaded.vocabulary)
