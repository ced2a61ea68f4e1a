"""From hidden states to log-probabilities and entropies of chosen tokens, in chunks.

Logits exist for one chunk of tokens at a time, forward and backward. What does not fit a fixed budget is computed again
in the backward pass, unless the loss is a sum over tokens and its gradient can be asked for: then the backward pass of
a chunk directly follows its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.algo.step_loss import LossGradient
from palestra.engine.sampler import truncate
from palestra.engine.supported import adapter_of, base_linear

# Logits alive at once. On a CPU a chunk should stay near the caches; a GPU wants large products.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**29}
PLAIN_CHUNK_ELEMENTS = 2**26  # without the Triton kernels, which need no float32 copies of the logits
CUT_LOGIT = -1e30  # finite: 0 times it is 0
# Logits kept for the backward pass. The CPU's statistics overwrite float32 logits, so none are kept there.
KEPT_BYTES = {"cuda": 2**31}


def score_tokens(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    target: Tensor,  # [N] int64, or [N, k] for several targets of each hidden state
    rule: LogitRule,
    *,
    entropy_gradient: bool = False,
    adapter: tuple[Tensor, Tensor] | None = None,
    loss_gradient: LossGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the targets, in their shape, [N] entropy of each distribution), both float32.

    The entropy carries no gradient unless asked for. `adapter` is what a low-rank one adds to the logits, as two
    factors: [N, r] and [V, r]. `loss_gradient` is of the very loss that `backward` will be called on.
    """
    low, up = adapter if adapter is not None else (None, None)
    logprobs, entropy = _Score.apply(hidden, weight, bias, low, up, target, rule, entropy_gradient, loss_gradient)
    return logprobs, entropy


def top_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """([n, k] ids of the most likely tokens, [n, k] log-probabilities) by [n, V] logits as they are sampled from."""
    values, ids = logits.float().topk(min(k, logits.shape[-1]), dim=-1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)


class ScoringHead(nn.Module):
    """The model's output layer, for scoring instead of whole logits. As a module's forward, so that hooks see it."""

    def __init__(self, output: Any, rule: LogitRule) -> None:
        super().__init__()
        self.output = output  # the model's own layer: its weights are trained
        self._linear = (base_linear(output),)  # in a tuple, so that it is no second submodule
        self.rule = rule

    def forward(
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        rule: LogitRule | None = None,
        entropy_gradient: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, H] and target [N] -> ([N] log-probabilities, [N] entropies), by its own rule unless one is given.

        With target [N, k] the log-probabilities are [N, k].
        """
        weight, bias, adapter = self._weights(hidden)
        options: dict[str, Any] = {"entropy_gradient": entropy_gradient, "loss_gradient": loss_gradient}
        return score_tokens(hidden, weight, bias, target, rule or self.rule, adapter=adapter, **options)

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """([N, k] ids of the most likely tokens, most likely first, [N, k] their log-probabilities in float32)."""
        weight, bias, adapter = self._weights(hidden)
        low, up = adapter if adapter is not None else (None, None)
        size = _chunk_tokens(weight, len(hidden))
        parts = [top_of(hidden.new_empty(0, len(weight)), k)]
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            logits = _logits(hidden[part], weight, bias, low if low is None else low[part], up)
            parts.append(top_of(_final(logits, self.rule), k))
            del logits  # before the next ones are made
        ids, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
        return ids, logprobs

    def _weights(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """The output layer's weight and bias, and what its adapter, if switched on, makes of the hidden states."""
        (linear,), adapter = self._linear, None
        if linear is not self.output and not self.output.disable_adapters:
            found = adapter_of(self.output)
            assert found is not None
            low = F.linear(hidden.to(found.down.dtype), found.down) * found.scaling
            adapter = low.to(hidden.dtype), found.up.to(hidden.dtype)
        return linear.weight, getattr(linear, "bias", None), adapter


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
        loss_gradient: LossGradient | None,
    ) -> tuple[Tensor, Tensor]:
        size, kernels = _chunk_tokens(weight, len(hidden), target, rule), _kernels_for(target, rule)
        statistics, logit_gradient = kernels
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        saved_logits: list[Tensor] = []
        by_triton = target.dim() == 1 and not rule.truncates  # the torch functions may overwrite the logits
        keeps = any(ctx.needs_input_grad) and by_triton
        room = KEPT_BYTES.get(weight.device.type, 0) if keeps else 0
        at_once = loss_gradient is not None and 0 < room < len(hidden) * len(weight) * weight.element_size()
        gradients = _Gradients(ctx, hidden, weight, bias, low, up) if at_once else None
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            own_low, y = low if low is None else low[part], target[part]
            logits = _logits(hidden[part], weight, bias, own_low, up, rule.exact)
            logprobs, logsumexp, entropy = statistics(logits, y, rule)
            parts.append((logprobs, logsumexp, entropy))
            if gradients is not None and loss_gradient is not None:
                by_logprob, by_entropy = loss_gradient(logprobs, entropy, part)
                steer = (entropy, by_entropy) if entropy_gradient else (None, None)
                gradients.add(part, logit_gradient(logits, y, logsumexp, by_logprob, *steer, rule))
            elif (room := room - logits.nbytes) >= 0:
                saved_logits.append(logits)
            del logits  # before the next ones are made
        columns = zip(*parts, strict=True) if parts else [(hidden.new_empty(0, dtype=torch.float32),)] * 3
        logprobs, logsumexp, entropy = (torch.cat(column) for column in columns)
        logprobs = logprobs.view_as(target)
        ctx.gradients = None if gradients is None else gradients.rounded()
        if gradients is None:
            ctx.save_for_backward(hidden, weight, bias, low, up, target, logsumexp, entropy)
            ctx.rule, ctx.entropy_gradient, ctx.saved_logits = rule, entropy_gradient, saved_logits
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by hidden states, weight, bias and the adapter's factors, from logits that were kept or not."""
        known, ctx.gradients = ctx.gradients, None
        if known is not None:
            return *known, None, None, None, None
        (grad_logprobs, grad_entropy), rule = grads, ctx.rule
        hidden, weight, bias, low, up, target, logsumexp, entropy = ctx.saved_tensors
        size, (_, logit_gradient) = _chunk_tokens(weight, len(hidden), target, rule), _kernels_for(target, rule)
        gradients = _Gradients(ctx, hidden, weight, bias, low, up)
        saved_logits, ctx.saved_logits = iter(ctx.saved_logits), []
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            logits = next(saved_logits, None)
            if logits is None:
                logits = _logits(hidden[part], weight, bias, low if low is None else low[part], up, rule.exact)
            steer = (entropy[part], grad_entropy[part]) if ctx.entropy_gradient else (None, None)
            gradient = logit_gradient(logits, target[part], logsumexp[part], grad_logprobs[part], *steer, rule)
            gradients.add(part, gradient)
            del logits, gradient  # before the next ones are made
        return *gradients.rounded(), None, None, None, None


class _Gradients:
    """Sums over chunks of what the gradient of logits says of all else; of weights in float32."""

    def __init__(
        self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None
    ) -> None:
        self._inputs = hidden, weight, bias, low, up
        self.hidden = torch.empty_like(hidden)
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        self.bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            self.bias = torch.zeros_like(bias, dtype=torch.float32)
        self.low = None if low is None else torch.empty_like(low)
        self.up = None if up is None else torch.zeros_like(up, dtype=torch.float32)

    def add(self, part: slice, gradient: Tensor) -> None:
        """`gradient` is [n, V], of the logits of these tokens."""
        hidden, weight, _, low, up = self._inputs
        torch.mm(gradient, weight, out=self.hidden[part])
        if self.weight is not None:
            _add_product(self.weight, gradient, hidden[part])
        if low is not None and up is not None and self.low is not None and self.up is not None:
            torch.mm(gradient, up, out=self.low[part])
            _add_product(self.up, gradient, low[part])
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=torch.float32)

    def rounded(self) -> tuple[Tensor | None, ...]:
        """Each in the type of what it is the gradient of."""
        found = (self.hidden, self.weight, self.bias, self.low, self.up)
        pairs = zip(found, self._inputs, strict=True)
        return tuple(x if x is None or like is None else x.to(like.dtype) for x, like in pairs)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None, exact: bool = False
) -> Tensor:
    if exact:
        from palestra.engine.cuda.exact import product

        logits = product(hidden, weight)
        return logits if bias is None else logits.add_(bias)
    logits = F.linear(hidden, weight, bias)
    return logits if low is None or up is None else logits.addmm_(low, up.T)


def _chunk_tokens(weight: Tensor, tokens: int, target: Tensor | None = None, rule: LogitRule | None = None) -> int:
    """Tokens of one chunk: all chunks of nearly the same size, so that the largest is as small as can be."""
    elements = CHUNK_ELEMENTS.get(weight.device.type, PLAIN_CHUNK_ELEMENTS)
    if target is None or target.dim() == 2 or (rule is not None and rule.truncates):
        elements = min(elements, PLAIN_CHUNK_ELEMENTS)
    most = max(128, elements // len(weight) // 128 * 128)
    chunks = max(1, -(-tokens // most))
    return -(-tokens // chunks // 128) * 128 or 128


def _kernels_for(target: Tensor, rule: LogitRule) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two passes over a chunk of logits, which may overwrite it.

    On a GPU by Triton for one target for each hidden state and whole distributions.
    """
    if target.device.type != "cuda" or target.dim() == 2 or rule.truncates:
        return _statistics, _logit_gradient
    from palestra.learner import kernels

    return kernels.statistics, kernels.logit_gradient


def _final(logits: Tensor, rule: LogitRule) -> Tensor:
    """[n, V] float32 logits as they are sampled from; may overwrite the raw ones."""
    z = logits.float()
    if rule.softcap is not None:
        return z.mul_(rule.multiplier / rule.softcap).tanh_().mul_(rule.softcap / rule.temperature)
    return z if rule.multiplier == rule.temperature else z.mul_(rule.multiplier / rule.temperature)


def _statistics(logits: Tensor, target: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets ([n] or [n, k]), [n] log-sum-exp, and [n] entropy."""
    z = kept_logits(_final(logits, rule), target, rule)
    top = z.amax(-1, keepdim=True)
    z.sub_(top)
    weights = z.exp()
    total = weights.sum(-1)
    log_total = total.log()
    chosen = z.gather(-1, target.reshape(len(target), -1))  # [n, k]
    entropy = log_total - weights.mul_(z).sum(-1) / total
    return (chosen - log_total[:, None]).view_as(target), log_total + top.squeeze(-1), entropy


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
    by_target = grad_logprobs.reshape(len(target), -1)  # [n, k]
    grad_logprobs = by_target.sum(-1)
    z = _final(logits, rule)
    slope = None
    if rule.softcap is not None:
        slope = 1 - (z * (rule.temperature / rule.softcap)).square_()  # of tanh
    log_p = kept_logits(z, target, rule).sub_(logsumexp[:, None])
    if entropy is not None and grad_entropy is not None:
        spread = (log_p + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        gradient = spread.mul_(log_p.exp_()).mul_(-scale)
    else:
        gradient = log_p.exp_().mul_((grad_logprobs * -scale)[:, None])
    gradient.scatter_add_(-1, target.reshape(len(target), -1), by_target * scale)
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


@dataclass(frozen=True)
class LogitRule:
    """How a model makes its final logits: softcap(multiplier · (W h + b)), then divided by the temperature, then
    truncated as the sampler does it."""

    multiplier: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    exact: bool = False  # by the sampler's kernels
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def whole(self) -> LogitRule:
        """The same without truncation: for tokens that were not sampled."""
        return replace(self, top_p=1.0, top_k=0, min_p=0.0) if self.truncates else self


def kept_logits(z: Tensor, target: Tensor, rule: LogitRule) -> Tensor:
    """[n, V] the logits that are left by top_k, top_p and min_p; the others are so low that their probability is 0.

    The targets always stay: a token that the policy now would cut off was sampled by an earlier version of it.
    """
    if not rule.truncates or not len(z):
        return z
    column = partial(torch.full, (len(z), 1), device=z.device)
    left = truncate(z.detach(), *(column(float(value)) for value in (rule.top_k, rule.top_p, rule.min_p)))
    cut = left.isneginf().scatter_(-1, target.reshape(len(target), -1), False)
    return z.masked_fill(cut, CUT_LOGIT)


def logit_rule(model: Any, temperature: float) -> LogitRule:
    """What the model does to its logits after the output layer; temperature 0 trains at 1."""
    config = model.config
    multiplier = 1.0
    if scaling := getattr(config, "logits_scaling", None):
        multiplier = 1.0 / scaling
    elif scale := getattr(config, "logit_scale", None):
        multiplier = float(scale)
    return LogitRule(multiplier, getattr(config, "final_logit_softcapping", None), temperature or 1.0)
