"""Is the fast way right for this model? A few tokens, forward and backward, against its own logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from palestra.algo.batching import MicroBatch, pack
from palestra.core.types import Sample

if TYPE_CHECKING:
    from palestra.learner.forward import Scorer

log = logging.getLogger(__name__)

RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm")
# What rounding explains: the difference of log-probabilities (root mean square; unlikely tokens of a trained model
# are off by tenths in bfloat16), and of a gradient relative to its size. A wrong way is off by whole nats.
TOLERANCES = {torch.bfloat16: (0.3, 0.5), torch.float16: (0.05, 0.1)}
FULL_PRECISION = (5e-4, 1e-2)


def settle(scorer: Scorer) -> None:
    """Set the scorer's way to the first that gives the model's own numbers; say so when it is not the best one."""
    model = scorer.model
    training = model.training
    model.train(not _drops(model))  # as the learner will call it, so that what is compiled here serves there
    try:
        shared, apart = _probe(model.get_input_embeddings().weight)
        expected = _numbers(model, lambda: scorer.from_logits(apart))
        compiled, scorer.compiled = scorer.compiled, False
        scorer.way = "trees"
        if reason := _cannot_share(model) or _mismatch(scorer, shared, expected):
            scorer.way = "padded"
            log.warning("the learner computes padded rows, prompts not shared: %s", reason)
            if reason := _mismatch(scorer, apart, expected):
                scorer.way = "logits"
                log.warning("the learner computes whole logits, which takes more memory: %s", reason)
        elif compiled:
            scorer.compiled = True
            if (reason := _mismatch(scorer, shared, expected)) and scorer.compiled_at_once > 1:
                scorer.compiled_at_once = 1
                reason = _mismatch(scorer, shared, expected)
            if reason:
                scorer.compiled = False
                log.warning("the learner runs uncompiled, which is slower: %s", reason)
    finally:
        model.train(training)


def _drops(model: nn.Module) -> bool:
    """Whether training differs from evaluation by chance."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    settings = vars(model.config) | vars(model.config.get_text_config())  # type: ignore[operator, union-attr]
    return any(value for name, value in settings.items() if "dropout" in name or "jitter" in name)


def _cannot_share(model: nn.Module) -> str | None:
    """Layers that carry a state from token to token would carry it from one sibling to the next."""
    kinds = [str(kind) for kind in getattr(model.config, "layer_types", None) or []]
    recurrent = [kind for kind in kinds if any(word in kind for word in RECURRENT)]
    return f"{type(model).__name__} has {recurrent[0]} layers" if recurrent else None


def _mismatch(scorer: Scorer, batch: MicroBatch, expected: list[Tensor]) -> str | None:
    """Why the scorer as it is set cannot be used, or None."""
    model = scorer.model
    name = type(model).__name__
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        return f"the output layer of {name} is not a plain linear layer"
    try:
        with scorer.session():
            found = _numbers(model, lambda: scorer(batch))
    except Exception as error:  # whatever a foreign model or a compiler raises, a plainer way remains
        return f"{name} raised {type(error).__name__}: {error}"
    logprob_limit, gradient_limit = TOLERANCES.get(model.dtype, FULL_PRECISION)
    difference = float((found[0] - expected[0]).square().mean().sqrt())
    if not difference <= logprob_limit:
        return f"{name} differs by {difference:.2g} from its own log-probabilities on a small check"
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        error_norm, norm = float((mine - theirs).norm()), float(theirs.norm())
        if not error_norm <= gradient_limit * norm + 1e-6:
            return f"{name} differs by {error_norm / max(norm, 1e-6):.0%} from its own gradient on a small check"
    return None


def _numbers(model: nn.Module, score: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The log-probabilities, and the gradient of their weighted sum by a few weights, where any is trained."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    watched = [*trainable[:2], *trainable[-1:]] if len(trainable) > 2 else trainable
    with torch.enable_grad():
        logprobs, _ = score()
        weights = torch.linspace(-1.0, 1.0, len(logprobs), device=logprobs.device)
        gradients = torch.autograd.grad((logprobs * weights).sum(), watched, allow_unused=True) if watched else ()
    return [logprobs.detach(), *(g.float() for g in gradients if g is not None)]


def _probe(embeddings: Tensor) -> tuple[MicroBatch, MicroBatch]:
    """Three siblings of unlike lengths, packed as one tree and apart; the scored tokens come in the same order."""
    ids = [(i * 7919 + 17) % len(embeddings) for i in range(28)]
    samples = []
    for first, last in ((9, 15), (15, 24), (24, 28)):
        n = last - first
        tokens = tuple(ids[:9] + ids[first:last])
        samples.append(Sample(tokens, (False,) * 9 + (True,) * n, (False,) * (9 + n), (0.0,) * (9 + n), 0.0, 0, 9))
    shared, apart = (pack(samples, max_tokens=1024, share_prefix=share)[0] for share in (True, False))
    return shared.to(embeddings.device), apart.to(embeddings.device)
