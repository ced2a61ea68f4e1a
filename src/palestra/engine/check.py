"""The self-check at load: what the engine samples, scored by the model's own forward in the same dtype.

Two forks of a random prompt sample a turn, get tokens appended, and sample again, finally together with a branch of
one. The lengths cover what can go wrong in an engine: prefill and decode cross page boundaries,
a partial page is copied for a fork, the prompt is longer than the sliding window, KV leaves the batch and comes back,
and what was sampled is read from pages by the branch. Each turn takes another of the runner's ways to compute a decode
step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from palestra.core.errors import UnsupportedModel
from palestra.core.types import SamplingParams
from palestra.engine.attention import REMEDY, plain_forward
from palestra.engine.supported import has_experts, text_config

log = logging.getLogger(__name__)

NEW_TOKENS = 8  # of each turn
APPENDED_TOKENS = (3, 5, 4)  # to each fork and to the branch
MAX_TURNS = 3
MAX_GROWTH = MAX_TURNS * NEW_TOKENS + (MAX_TURNS - 1) * max(APPENDED_TOKENS)  # of a fork
MAX_WINDOW_FLOPS, MAX_WINDOW_FLOPS_CUDA = 2e11, 1e15  # a second or two; a window that costs more is left out
HALF_FACTOR, FLOAT32_FACTOR, EXPERTS_FACTOR, FOUR_BIT_FACTOR = 2.0, 16.0, 4.0, 2.0  # see `tolerated_difference`


def check_logprobs(engine: Any, model: Any, page_size: int, capacity: int) -> None:
    """UnsupportedModel if the engine's logprobs differ from the model's own by more than rounding explains.

    `engine` is an Engine, which runs this at load; `capacity` is how many tokens a session may have.
    """
    config = text_config(model)
    generator = torch.Generator().manual_seed(0)

    def random_ids(n: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (n,), generator=generator).tolist()

    sessions = engine.fork(engine.open(random_ids(prompt_length(model, page_size, capacity))), 2)
    differences, spreads = [], []
    runner = engine.runner
    usual, paths = runner.path, [*runner.paths, *runner.paths][: max(2, len(runner.paths))]
    sampled: list[list[tuple[int, float]]] = [[], [], []]  # of each session: places, and logprobs of the tokens there
    try:
        for number, runner.path in enumerate(paths, 1):
            if number == len(paths):
                sessions.append(engine.branch(sessions[1], len(sessions[1].token_ids)))
            for session, count in zip(sessions, APPENDED_TOKENS, strict=False):
                engine.append(session, random_ids(count) if number > 1 else [])
            starts = [len(session.token_ids) for session in sessions]
            seeds = range(2 * number, 2 * number + len(sessions))
            turns = engine.sample(sessions, [SamplingParams(NEW_TOKENS, seed=seed) for seed in seeds])
            for noted, start, turn in zip(sampled, starts, turns, strict=False):
                noted += enumerate(turn.logprobs.tolist(), start)
        for session, noted in zip(sessions, sampled, strict=True):
            places, logprobs = zip(*noted, strict=True)
            expected, logits = reference_logprobs(model, session.token_ids, places)
            differences.append((torch.tensor(logprobs) - expected).abs())
            spreads.append(logits.std(-1))
    finally:
        runner.path = usual
        for session in sessions:
            engine.close(session)
    difference, spread = torch.cat(differences).mean().item(), torch.cat(spreads).mean().item()
    tolerated = tolerated_difference(model, spread)
    log.debug("self-check: logprobs differ by %.2g on average; %.2g is tolerated", difference, tolerated)
    if not difference <= tolerated:  # NaN, too
        raise UnsupportedModel(
            f"{config.model_type}: the paged engine's logprobs differ from the model's own by {difference:.2g} on "
            f"average, and rounding explains at most {tolerated:.2g}; {REMEDY}"
        )


def prompt_length(model: Any, page_size: int, capacity: int) -> int:
    """Such that the prompt ends three tokens before a page does, in the second page or later, behind the window."""
    length = 2 * page_size - 3
    window = getattr(text_config(model), "sliding_window", None)
    if window:
        longer = window + min(window, 256)  # enough that keys outside of the window would be noticed
        flops_per_token = 2.0 * sum(p.numel() for p in model.parameters())
        forwards = 4  # the engine's, and one for each session
        limit = MAX_WINDOW_FLOPS_CUDA if _device(model).type == "cuda" else MAX_WINDOW_FLOPS
        if flops_per_token * longer * forwards <= limit:
            length = max(length, longer)
        else:
            log.info("the self-check leaves out the sliding window of %d tokens, which would take too long", window)
    length += (page_size - 3 - length) % page_size
    return max(1, min(length, capacity - MAX_GROWTH))


def reference_logprobs(model: Any, token_ids: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logprobs [n] of the tokens at `places` by the model's own forward, and the logits [n, V] behind them."""
    ids = torch.tensor([token_ids], device=_device(model))
    before = torch.tensor(places, device=ids.device) - 1
    output = plain_forward(model, ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=before)
    logits = output.logits[0].float().cpu()
    return logits.log_softmax(-1).gather(1, ids[0, before + 1, None].cpu())[:, 0], logits


def tolerated_difference(model: Any, spread: float) -> float:
    """The mean difference of logprobs that rounding explains, where logits have the standard deviation `spread`.

    Every layer adds two rounded terms to the residual stream. Their errors, one unit roundoff each, add up like a
    random walk of 2 * layers steps, and reach the logits in proportion to their spread. Models of 4 to 30 layers
    were measured at 0.7 times this in bfloat16 and float16 (1.2 at most), and at 4 times in float32 (5 at most),
    where the matrix products round at every addition. Rounding may also choose another expert, and products of 4-bit
    weights round these at many rows, but not at few.
    """
    config, dtype = text_config(model), model.dtype
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2
    factor = HALF_FACTOR if dtype.itemsize == 2 else FLOAT32_FACTOR
    if dtype == torch.float32 and _device(model).type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        unit, factor = 2.0**-11, HALF_FACTOR
    if has_experts(config):
        factor *= EXPERTS_FACTOR
    if getattr(model, "is_loaded_in_4bit", False):
        factor *= FOUR_BIT_FACTOR
    return max(1e-5, factor * unit * math.sqrt(2 * config.num_hidden_layers) * spread)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device
