"""The self-check at load: the engine's logits beside the model's own, on a few tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from palestra.core.types import SamplingParams
from palestra.engine.attention import AttentionSwitch, UnsupportedModel
from palestra.engine.probe import REMEDY, text_config

if TYPE_CHECKING:
    from palestra.engine.engine import Engine

log = logging.getLogger(__name__)

PROMPT_TOKENS, NEW_TOKENS = 7, 4
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # on the logprob of a token; half precision below
HALF_TOLERANCE = 0.25


def check_logits(engine: Engine) -> float:
    """Sample a forked session and score its tokens with the plain model; UnsupportedModel if they disagree.

    Where only the lean way disagrees, or does not run at all, the engine gives it up and says so.
    """
    try:
        return _checked(engine)
    except UnsupportedModel as error:
        if not engine.runner.give_up_lean():
            raise
        log.warning("the lean way differs or does not run, so layer by layer it is, slower: %s", error)
        return _checked(engine)


def _checked(engine: Engine) -> float:
    """The largest difference between a sampled token's logprob and the plain model's."""
    name = text_config(engine.model).model_type
    tolerance = TOLERANCE.get(engine.model.dtype, HALF_TOLERANCE)  # type: ignore[call-overload]
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, engine.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
    pair = engine.fork(engine.open(prompt), 2)
    try:
        turns = engine.sample(pair, [SamplingParams(NEW_TOKENS, seed=s) for s in (1, 2)])
        gaps = [_gap(engine.model, s.token_ids, turn.logprobs) for s, turn in zip(pair, turns, strict=True)]
    except Exception as error:
        raise UnsupportedModel(f"{name} does not run with the paged engine ({error}); {REMEDY}") from error
    finally:
        for session in pair:
            engine.close(session)
    for gap in gaps:
        if not gap <= tolerance:  # NaN, too
            raise UnsupportedModel(f"{name}: engine and plain forward differ by {gap:.2g} in logprob; {REMEDY}")
    return max(gaps)


def _gap(model: nn.Module, token_ids: Sequence[int], logprobs: Sequence[float]) -> float:
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    with torch.inference_mode(), AttentionSwitch(model).use(_own_attention(model), training=False):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
    expected = logits.log_softmax(-1)[PROMPT_TOKENS - 1 : -1].gather(1, ids[0, PROMPT_TOKENS:, None])[:, 0].cpu()
    return (expected - torch.tensor(logprobs)).abs().max().item()


def _own_attention(model: torch.nn.Module) -> str:
    return model.config._attn_implementation or "sdpa"  # type: ignore[union-attr, return-value]
