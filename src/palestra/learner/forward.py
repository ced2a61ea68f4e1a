"""The learner's forward pass: a packed micro-batch in, log-probabilities of its scored tokens out.

`trees` computes packed rows that share their prompts, and never holds whole logits. `reference` pads every row and
takes the model's own logits: for models whose layers cannot be told who may see whom, or that do more to their
logits than the head knows. A self-check at load compares the two and chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from palestra.algo.batching import MicroBatch, take_rows
from palestra.algo.step_loss import LossGradient
from palestra.core.errors import UnsupportedModel
from palestra.engine.attention import ModulePatches
from palestra.engine.recurrent import RecurrentLayers
from palestra.engine.routing import RoutingMode, RoutingReplay
from palestra.engine.supported import (
    NO_EXACT,
    base_model,
    decoder_layers,
    decoder_of,
    is_standard_rms_norm,
    norm_epsilon,
)
from palestra.learner.compiled_layers import LAYOUTS, compile_layers
from palestra.learner.graphs import Graphs, can_be_captured
from palestra.learner.head import LogitRule, ScoringHead, kept_logits, logit_rule, top_of
from palestra.learner.self_check import choose_mode
from palestra.learner.tree_attention import NAME, Layout, tree_attention
from palestra.learner.tree_recurrence import over_trees

if TYPE_CHECKING:
    from palestra.learner.exact import ExactForward

Mode = Literal["trees", "reference"]
WORTH_COMPILING = 50_000_000  # parameters; a smaller model's steps take less time than its compiler
MAX_MLP_SHARE = 0.75  # of the tokens; above this, selecting them saves nothing
MIN_ROOT = 64  # tokens; to attend to a shorter root costs more than to compute its tokens with every prompt


class Scorer(nn.Module):
    """Log-probabilities of chosen tokens under one causal language model. Its forward is the root of every pass."""

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        truncation: Mapping[str, Any] = MappingProxyType({}),
        pad_token_id: int = 0,
        compile_layers: bool | None = None,
        in_shards: bool = False,
        exact: bool = False,
        mode: Mode | None = None,
        routing: RoutingMode = "own",
    ) -> None:
        """`compile_layers`: None compiles large models on a CUDA GPU, where it is soon worth the wait.

        `exact`: the sampler's log-probabilities, to the bit (`model.exact`).
        `truncation` is top_p, top_k and min_p of the sampler.
        `in_shards`: hooks around each layer will gather its weights, and must stay outside of what is compiled.
        `mode`: what was chosen for the same model before.
        `routing`: compare the choice of experts with the sampler's, or use the sampler's; layers are not compiled then.
        """
        super().__init__()
        self.model = base_model(model)
        self.pad_token_id = pad_token_id
        self.head = ScoringHead(self.model.get_output_embeddings(), logit_rule(self.model, temperature))
        large = self.model.num_parameters() >= WORTH_COMPILING and self.model.device.type == "cuda"
        self.compiled = (large if compile_layers is None else compile_layers) and routing == "own"
        self.in_shards = in_shards
        self.flash_windows = True  # on a GPU: windows and sinks by flash attention instead of masks
        self.mode: Mode = mode or "trees"
        self._recurrent = RecurrentLayers(self.model)
        self._layout: Any = None  # of the current pass
        self._on_cpu = self.model.device.type == "cpu"
        self._norms = fast_norms(self.model) if self._on_cpu else []
        self._decoder, self.layers = (decoder_of(self.model),), decoder_layers(self.model)  # no further submodules
        self.graphs: Graphs | None = None
        self.exact: ExactForward | None = None
        self.routing = RoutingReplay(self.model, routing) if routing != "own" else None
        if mode is None:
            choose_mode(self)
        self.head.rule = replace(self.head.rule, **truncation)  # the check compares whole distributions
        if exact:
            if self.mode != "trees" or in_shards:
                raise UnsupportedModel(f"model.exact has no kernels for this model, or for several ranks; {NO_EXACT}")
            from palestra.learner.exact import ExactForward

            self.head.rule = replace(self.head.rule, exact=True)
            self.exact = ExactForward(self.model)
        captures = (
            not exact and self.mode == "trees" and self.compiled and not in_shards and can_be_captured(self.model)
        )
        self.graphs = Graphs(self.model, self._run_layers) if captures else None

    @property
    def shares_prefix(self) -> bool:
        """Whether a micro-batch may hold trees of several rows."""
        return self.mode == "trees"

    @property
    def shares_root(self) -> bool:
        """Whether a micro-batch may hold the common beginning of its trees once.

        The sampler's kernels (`model.exact`) compute whole rows; a token's recorded experts differ from row to row.
        """
        return self.shares_prefix and self.exact is None and self.routing is None

    @property
    def min_root(self) -> int:
        """For `pack_batch`: the tokens from which a common beginning is computed once; 0: never."""
        return MIN_ROOT if self.shares_root else 0

    @contextmanager
    def session(self, *, training: bool | None = None) -> Iterator[None]:
        """Forward and backward passes happen inside; the model is as it was afterwards.

        `training` switches the modules to training or evaluation mode; None leaves them as they are.
        """
        is_packed = self.mode == "trees"
        with ModulePatches() as patches:
            if is_packed and self._recurrent.modules:
                over = over_trees(self._recurrent, lambda: self._layout, in_shards=self.in_shards)
                patches.enter_context(self._recurrent.use(over))
            if self.routing is not None:
                patches.enter_context(self.routing.use())
            if training is not None:
                patches.set_training(self.model, training)
            for norm, stand_in in self._norms:
                patches.set(norm, "forward", stand_in)
            if is_packed:
                AttentionInterface.register(NAME, tree_attention)
                patches.set(self.model.config, "_attn_implementation", NAME)
            if self.compiled:
                compile_layers(self.layers, patches, with_hooks=not self.in_shards)
            if self.exact is not None:
                self.exact.refresh()
            yield

    def forward(
        self,
        micro: MicroBatch,
        *,
        temperature: float | None = None,
        entropy_gradient: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor]:
        """([S] log-probabilities, [S] entropies) of the micro-batch's scored tokens; [S · k] of k candidates at each.

        Sampled tokens are scored at the temperature that they were sampled with, and by what top_p, top_k and min_p
        left of the distribution, unless another temperature is given. Tool results are scored at 1, by all of it.
        `loss_gradient` saves memory and time where the loss is a sum over tokens.
        """
        if self.mode == "reference":
            return self.from_logits(micro, temperature)
        hidden, target = self._scored_hidden(micro), micro.target
        rule = self._rule(target, temperature)
        if target.dim() == 2:
            logprobs, entropies = self.head(hidden, target, rule=rule, entropy_gradient=entropy_gradient)
            return logprobs.flatten(), entropies.repeat_interleave(target.shape[1])
        if not len(micro.echo) or rule == (observed := replace(rule.whole, temperature=1.0)):
            options: dict[str, Any] = {"entropy_gradient": entropy_gradient, "loss_gradient": loss_gradient}
            return self.head(hidden, target, rule=rule, **options)
        parts = [
            self.head(hidden[chosen], target[chosen], rule=own, entropy_gradient=entropy_gradient)
            for chosen, own in ((micro.policy, rule), (micro.echo, observed))
        ]
        order = torch.cat([micro.policy, micro.echo]).argsort()
        logprobs, entropies = (torch.cat(both)[order] for both in zip(*parts, strict=True))
        return logprobs, entropies

    def _rule(self, target: Tensor, temperature: float | None) -> LogitRule:
        """How these targets are scored: sampled tokens as they were sampled, all others by the whole distribution."""
        own = self.head.rule
        if temperature is not None:
            return replace(own.whole, temperature=temperature)
        return own if target.dim() == 1 else own.whole

    @torch.no_grad()
    def top(self, micro: MicroBatch, k: int) -> tuple[Tensor, Tensor]:
        """([S, k] ids, [S, k] log-probabilities) of the k most likely tokens where the scored ones are predicted."""
        if self.mode == "reference":
            return top_of(self._whole_logits(micro) / self.head.rule.temperature, k)
        return self.head.top(self._scored_hidden(micro), k)

    def _scored_hidden(self, micro: MicroBatch) -> Tensor:
        """[S, H] the hidden states that predict the scored tokens."""
        return take_rows(self._packed_hidden(micro), micro.layout.computed_at(micro.source))

    def _packed_hidden(self, micro: MicroBatch) -> Tensor:
        """[T, H] in the layout's order; right at the places that the batch reads."""
        layout = micro.layout
        ids, positions = layout.reorder(micro.token_ids), layout.reorder(micro.position_ids)
        if self.exact is not None:
            return self.exact.hidden(ids, positions, layout)
        if self.graphs is not None and layout.bounds.shape is not None and torch.is_grad_enabled():
            return self.graphs.hidden(ids, positions, layout)
        # A compiled or recomputed layer must be the same each time.
        again = self.compiled or self.model.is_gradient_checkpointing or self.routing is not None
        if self.routing is not None:
            self.routing.start(None if micro.routing is None else layout.reorder(micro.routing))
        with ModulePatches() as patches:
            if self._on_cpu and not again:
                last_mlp_at(self.layers, micro.source, len(micro.token_ids), patches)
            return self._run_layers(ids, positions, layout)

    def _run_layers(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        self._layout = layout
        layout.positions, layout.recurrent = positions, self._recurrent.layers
        layout.flash_windows = self.flash_windows
        if self.compiled and layout.handle is None:
            layout.handle = LAYOUTS.add(layout)
        options: dict[str, Any] = {"use_cache": False, "layout": layout}
        out = self._decoder[0](input_ids=ids[None], position_ids=positions[None], **options)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def routing_mismatch(self, micro: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """`RoutingReplay.mismatch` of the last pass, where policy tokens were predicted; None: nothing is known."""
        assert self.routing is not None
        source = micro.source[micro.policy if micro.each is None else micro.each[micro.policy]]
        if self.mode == "trees":
            return self.routing.mismatch(micro.layout.computed_at(source))
        return self.routing.mismatch(self._pad(micro)[1].flatten().nonzero()[:, 0][source])

    def from_logits(self, batch: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """The same from the model's own whole logits."""
        candidates, rule = batch.target.dim() == 2, self._rule(batch.target, temperature)
        raw = self._whole_logits(batch)
        logits = kept_logits(raw / rule.temperature, batch.target, rule)
        if len(batch.echo):  # tool results are scored at 1, by the whole distribution
            logits = logits.index_copy(0, batch.echo, raw.index_select(0, batch.echo))
        logp = torch.log_softmax(logits, dim=-1)
        if candidates:
            entropy = -(logp.exp() * logp).sum(-1).repeat_interleave(batch.target.shape[1])
            return logp.gather(-1, batch.target).flatten(), entropy
        return -nn.functional.nll_loss(logp, batch.target, reduction="none"), -(logp.exp() * logp).sum(-1)

    def _whole_logits(self, batch: MicroBatch) -> Tensor:
        """[S, V] float32: the model's own logits where the scored tokens are predicted."""
        ids, mask = self._pad(batch)
        if self.routing is not None:
            routing = batch.routing
            if routing is not None:  # [B · L, layers, k]: unknown at places of padding
                padded = routing.new_full((mask.numel(), *routing.shape[1:]), torch.iinfo(routing.dtype).max)
                padded[mask.flatten()] = routing
                routing = padded
            self.routing.start(routing)
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[mask]
        return logits.index_select(0, batch.source).float()

    def _pad(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[B, L] ids padded on the right and [B, L] bool where they are real; every tree is one row."""
        rows = batch.token_ids.split([tree.length for tree in batch.trees])
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=self.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def fast_norms(model: nn.Module) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """A model's RMS norms, and a faster forward of each on a CPU: the embedded model's update takes 7 % less time.

    Families write the norm differently (some scale by 1 + weight), so each class is compared with the formula first.
    """

    def stand_in(module: Any, epsilon: float | None) -> Callable[[Tensor], Tensor]:
        return lambda x: _RmsNorm.apply(x, module.weight, epsilon)

    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and norm_epsilon(m) is not None]
    first = {type(m): m for m in reversed(norms)}
    standard = {kind for kind, norm in first.items() if is_standard_rms_norm(norm)}
    return [(m, stand_in(m, norm_epsilon(m))) for m in norms if type(m) in standard]


class _RmsNorm(torch.autograd.Function):
    """The norm with its gradient written out: a third of the passes over memory that its formula makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, weight = ctx.saved_tensors
        grad = grads[0]
        along = grad * normed
        mean = torch.matmul(along, weight).div_(len(weight)).unsqueeze_(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1.0).mul_(inverse)
        return grad_x, along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None


def last_mlp_at(layers: list[nn.Module], source: Tensor, tokens: int, patches: ModulePatches) -> None:
    """Compute the last layer's MLP only at the tokens of `source`, whose hidden states are read.

    The other ones (prompts and tool results) are computed for their keys and values alone.
    """
    mlp = getattr(layers[-1], "mlp", None) if layers else None
    if not isinstance(mlp, nn.Module) or "forward" in mlp.__dict__:
        return
    rows = torch.unique(source)
    if len(rows) > MAX_MLP_SHARE * tokens:
        return
    whole = mlp.forward

    def forward(x: Tensor) -> Any:
        part = whole(x.index_select(1, rows))
        if not isinstance(part, Tensor):  # a mixture of experts that gives its router's choices too
            return whole(x)
        return x.new_zeros(1, tokens, part.shape[-1]).index_copy(1, rows, part)

    patches.set(mlp, "forward", forward)
