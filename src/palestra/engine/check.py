"""The self-check at load: the engine's logits beside the model's own, on a few tokens."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

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

    Where only the lean way disagrees, the engine gives it up and says so.
    """
    name = text_config(engine.model).model_type
    tolerance = TOLERANCE.get(engine.model.dtype, HALF_TOLERANCE)  # type: ignore[call-overload]
    worst = _difference(engine, name)
    if not worst <= tolerance and engine.runner.give_up_lean():
        log.warning("%s runs layer by layer, slower: the lean way differs by %.2g in logprob", name, worst)
        worst = _difference(engine, name)
    if not worst <= tolerance:
        raise UnsupportedModel(f"{name}: engine and plain forward differ by {worst:.2g} in logprob; {REMEDY}")
    return worst


def _difference(engine: Engine, name: str) -> float:
    """The largest between a sampled token's logprob and the plain model's."""
    device = next(engine.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, engine.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
    child, other = engine.fork(engine.open(prompt), 2)
    try:
        turns = engine.sample([child, other], [SamplingParams(NEW_TOKENS, seed=s) for s in (1, 2)])
    except Exception as error:
        raise UnsupportedModel(f"{name} does not run with the paged engine ({error}); {REMEDY}") from error
    worst = 0.0
    for session, turn in zip((child, other), turns, strict=True):
        ids = torch.tensor([session.token_ids], device=device)
        model = engine.model
        with torch.inference_mode(), AttentionSwitch(model).use(_own_attention(model), training=False):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(-1)[PROMPT_TOKENS - 1 : -1]
        expected = logprobs.gather(1, ids[0, PROMPT_TOKENS:, None])[:, 0].cpu()
        difference = (expected - torch.tensor(turn.logprobs)).abs().max().item()
        worst = max(worst, difference) if difference == difference else math.inf
        engine.close(session)
    return worst


def _own_attention(model: torch.nn.Module) -> str:
    return model.config._attn_implementation or "sdpa"  # type: ignore[union-attr, return-value]
