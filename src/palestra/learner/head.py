"""From hidden states to log-probabilities and entropies of chosen tokens, in chunks.

Logits exist for one chunk of tokens at a time, forward and backward: what does not fit a fixed budget is
computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.lora import adapter_of, base_linear
from palestra.learner.logit_rule import LogitRule

# Logits alive at once. On a CPU a chunk should stay near the caches; a GPU wants large products.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**29}
# Logits kept for the backward pass. The CPU's statistics overwrite float32 logits, so none are kept there.
KEPT_BYTES = {"cuda": 2**31}


def score_tokens(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    target: Tensor,  # [N] int64
    rule: LogitRule,
    *,
    entropy_gradient: bool = False,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """([N] log-probability of each target, [N] entropy of its distribution), both float32.

    The entropy carries no gradient unless asked for. `adapter` is what a low-rank one adds to the logits, as two
    factors: [N, r] and [V, r].
    """
    low, up = adapter if adapter is not None else (None, None)
    logprobs, entropy = _Score.apply(hidden, weight, bias, low, up, target, rule, entropy_gradient)
    return logprobs, entropy


class ScoringHead(nn.Module):
    """The model's output layer, for scoring instead of whole logits. As a module's forward, so that hooks see it."""

    def __init__(self, output: Any, rule: LogitRule) -> None:
        super().__init__()
        self.output = output  # the model's own layer: its weights are trained
        self.rule = rule

    def forward(
        self, hidden: Tensor, target: Tensor, *, temperature: float | None = None, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, H] and target [N] -> ([N] log-probabilities, [N] entropies); at the rule's own temperature."""
        linear = base_linear(self.output)
        bias = getattr(linear, "bias", None)
        rule = self.rule if temperature is None else replace(self.rule, temperature=temperature)
        adapter = self._adapter(hidden) if linear is not self.output else None
        return score_tokens(
            hidden, linear.weight, bias, target, rule, entropy_gradient=entropy_gradient, adapter=adapter
        )

    def _adapter(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """What peft's adapter of the output layer makes of the hidden states, unless it is switched off."""
        if self.output.disable_adapters:
            return None
        found = adapter_of(self.output)
        assert found is not None
        low = F.linear(hidden.to(found.down.dtype), found.down) * found.scaling
        return low.to(hidden.dtype), found.up.to(hidden.dtype)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        target: Tensor,
        rule: LogitRule,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        size, (statistics, _) = _chunk_tokens(weight, len(hidden)), _kernels(weight.device.type)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        saved_logits: list[Tensor] = []
        room = KEPT_BYTES.get(weight.device.type, 0) if any(ctx.needs_input_grad) else 0
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            logits, y = _logits(hidden[part], weight, bias, low if low is None else low[part], up), target[part]
            parts.append(statistics(logits, y, rule))
            room -= logits.nbytes
            if room >= 0:
                saved_logits.append(logits)
        columns = zip(*parts, strict=True) if parts else [(hidden.new_empty(0, dtype=torch.float32),)] * 3
        logprobs, logsumexp, entropy = (torch.cat(column) for column in columns)
        ctx.save_for_backward(hidden, weight, bias, low, up, target, logsumexp, entropy)
        ctx.rule, ctx.entropy_gradient, ctx.saved_logits = rule, entropy_gradient, saved_logits
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, low, up, target, logsumexp, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        size, (_, logit_gradient) = _chunk_tokens(weight, len(hidden)), _kernels(weight.device.type)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        grad_low = None if low is None else torch.empty_like(low)
        grad_up = None if up is None else torch.zeros_like(up, dtype=torch.float32)
        saved_logits, ctx.saved_logits = iter(ctx.saved_logits), []
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            logits = next(saved_logits, None)
            if logits is None:
                logits = _logits(hidden[part], weight, bias, low if low is None else low[part], up)
            gradient = logit_gradient(
                logits,
                target[part],
                logsumexp[part],
                grad_logprobs[part],
                entropy[part] if ctx.entropy_gradient else None,
                grad_entropy[part] if ctx.entropy_gradient else None,
                ctx.rule,
            )
            torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, gradient, hidden[part])
            if grad_low is not None and grad_up is not None:
                torch.mm(gradient, up, out=grad_low[part])
                _add_product(grad_up, gradient, low[part])
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        grad_up = None if grad_up is None else grad_up.to(up.dtype)
        return grad_hidden, grad_weight, grad_bias, grad_low, grad_up, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits if low is None or up is None else logits.addmm_(low, up.T)


def _chunk_tokens(weight: Tensor, tokens: int) -> int:
    """Tokens of one chunk: all chunks of nearly the same size, so that the largest is as small as can be."""
    most = max(128, CHUNK_ELEMENTS.get(weight.device.type, 2**26) // len(weight) // 128 * 128)
    chunks = max(1, -(-tokens // most))
    return -(-tokens // chunks // 128) * 128 or 128


@cache
def _kernels(device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two passes over a chunk of logits, which may overwrite it: by Triton on a GPU."""
    if device != "cuda":
        return _statistics, _logit_gradient
    from palestra.learner import head_kernels

    return head_kernels.statistics, head_kernels.logit_gradient


def _final(logits: Tensor, rule: LogitRule) -> Tensor:
    """[n, V] float32 logits as they are sampled from; may overwrite the raw ones."""
    z = logits.float()
    if rule.softcap is not None:
        return z.mul_(rule.multiplier / rule.softcap).tanh_().mul_(rule.softcap / rule.temperature)
    return z if rule.multiplier == rule.temperature else z.mul_(rule.multiplier / rule.temperature)


def _statistics(logits: Tensor, target: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor, Tensor]:
    """[n] log-probability of the target, log-sum-exp, and entropy."""
    z = _final(logits, rule)
    top = z.amax(-1, keepdim=True)
    z.sub_(top)
    weights = z.exp()
    total = weights.sum(-1)
    log_total = total.log()
    chosen = z.gather(-1, target[:, None]).squeeze(-1)
    entropy = log_total - weights.mul_(z).sum(-1) / total
    return chosen - log_total, log_total + top.squeeze(-1), entropy


def _logit_gradient(
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    rule: LogitRule,
) -> Tensor:
    """[n, V] gradient of the raw logits, in their dtype."""
    scale = rule.multiplier / rule.temperature
    z = _final(logits, rule)
    slope = None
    if rule.softcap is not None:
        slope = 1 - (z * (rule.temperature / rule.softcap)).square_()  # of tanh
    log_p = z.sub_(logsumexp[:, None])
    if entropy is not None and grad_entropy is not None:
        spread = (log_p + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        gradient = spread.mul_(log_p.exp_()).mul_(-scale)
    else:
        gradient = log_p.exp_().mul_((grad_logprobs * -scale)[:, None])
    gradient.scatter_add_(-1, target[:, None], (grad_logprobs * scale)[:, None])
    if slope is not None:
        gradient.mul_(slope)
    return gradient.to(logits.dtype)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total [V, H] float32 += gradientᵀ @ hidden, added up in float32."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, hidden)
    elif total.is_cuda:
        torch.addmm(total, gradient.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += gradient.T @ hidden
