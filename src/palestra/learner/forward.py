"""The learner's forward pass: a packed micro-batch in, log-probabilities of its scored tokens out.

`trees` computes packed rows that share their prompts, and never holds whole logits. `reference` pads every row and
takes the model's own logits: for models whose layers cannot be told who may see whom, or that do more to their
logits than the head knows. A self-check at load compares the two and chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, take_rows
from palestra.algo.step_loss import LossGradient
from palestra.core.config import RunConfig
from palestra.core.errors import InputError, UnsupportedModel
from palestra.core.types import Array
from palestra.engine.recurrent import RecurrentLayers
from palestra.engine.routing import ExpertRouting
from palestra.engine.supported import NO_EXACT, base_model
from palestra.learner.graphs import Graphs, can_be_captured
from palestra.learner.head import LogitRule, ScoringHead, kept_logits, logit_rule, top_of
from palestra.learner.micro_batches import (
    MicroBatchLimit,
    PackedBatch,
    PackedMicroBatch,
    micro_batch_tokens,
    pack_batch,
    rows_of,
    score_all,
    tokens_to_column,
)
from palestra.learner.patches import FastNorms, ModulePatches, compile_layers, decoder_layers, decoder_of, last_mlp_at
from palestra.learner.self_check import choose_mode
from palestra.learner.tree_attention import Layout, use_tree_attention
from palestra.learner.tree_recurrence import over_trees

if TYPE_CHECKING:
    from palestra.learner.exact import ExactForward

Mode = Literal["trees", "reference"]
RoutingMode = Literal["own", "compare", "replay"]
WORTH_COMPILING = 50_000_000  # parameters; a smaller model's steps take less time than its compiler
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
        self._layout: Layout | None = None
        self._norms = FastNorms(self.model) if self.model.device.type == "cpu" else None
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
        self.graphs = Graphs(self.model, self._layers) if captures else None

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
                over = over_trees(self._recurrent, self._current_layout, in_shards=self.in_shards)
                patches.enter_context(self._recurrent.use(over))
            if self.routing is not None:
                patches.enter_context(self.routing.use())
            if training is not None:
                patches.set_training(self.model, training)
            if self._norms is not None:
                self._norms.use(patches)
            if is_packed:
                use_tree_attention(self.model, patches)
            if self.compiled:
                compile_layers(decoder_layers(self.model), patches, with_hooks=not self.in_shards)
            if self.exact is not None:
                self.exact.refresh()
            yield

    def forward(
        self,
        micro: PackedMicroBatch,
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
            return self.from_logits(micro.batch, temperature)
        hidden = self._scored_hidden(micro)
        target = micro.batch.target
        rule = self._rule(target, temperature)
        if target.dim() == 2:
            logprobs, entropies = self.head(hidden, target, rule=rule, entropy_gradient=entropy_gradient)
            return logprobs.flatten(), entropies.repeat_interleave(target.shape[1])
        observed = replace(rule.whole, temperature=1.0)
        if not len(micro.echo) or rule == observed:
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
    def top(self, micro: PackedMicroBatch, k: int) -> tuple[Tensor, Tensor]:
        """([S, k] ids, [S, k] log-probabilities) of the k most likely tokens where the scored ones are predicted."""
        if self.mode == "reference":
            return top_of(self._whole_logits(micro.batch) / self.head.rule.temperature, k)
        return self.head.top(self._scored_hidden(micro), k)

    def _scored_hidden(self, micro: PackedMicroBatch) -> Tensor:
        """[S, H] the hidden states that predict the scored tokens."""
        return take_rows(self._packed_hidden(micro), micro.layout.computed_at(micro.batch.source))

    def _packed_hidden(self, micro: PackedMicroBatch) -> Tensor:
        """[T, H] in the layout's order; right at the places that the batch reads."""
        batch, layout = micro.batch, micro.layout
        ids, positions = layout.reorder(batch.token_ids), layout.reorder(batch.position_ids)
        if self.exact is not None:
            return self.exact.hidden(ids, positions, layout)
        if self.graphs is not None and layout.bounds.shape is not None and torch.is_grad_enabled():
            return self.graphs.hidden(ids, positions, layout)
        # A compiled or recomputed layer must be the same each time.
        again = self.compiled or self.model.is_gradient_checkpointing or self.routing is not None
        if self.routing is not None:
            self.routing.start(None if batch.routing is None else layout.reorder(batch.routing))
        layers = [] if again or self.model.device.type != "cpu" else decoder_layers(self.model)
        with ModulePatches() as patches:
            last_mlp_at(layers, batch.source, len(batch.token_ids), patches)
            return self._layers(ids, positions, layout)

    def _layers(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        self._layout = layout
        layout.positions, layout.recurrent = positions, self._recurrent.layers
        layout.flash_windows = self.flash_windows
        options: dict[str, Any] = {"use_cache": False, "layout": layout}
        out = decoder_of(self.model)(input_ids=ids[None], position_ids=positions[None], **options)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _current_layout(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def routing_mismatch(self, micro: PackedMicroBatch) -> tuple[Tensor, Tensor] | None:
        """`RoutingReplay.mismatch` of the last pass, where policy tokens were predicted; None: nothing is known."""
        if self.routing is None:
            return None
        source = micro.batch.source[micro.policy if micro.batch.each is None else micro.batch.each[micro.policy]]
        if self.mode == "trees":
            return self.routing.mismatch(micro.layout.computed_at(source))
        return self.routing.mismatch(self._pad(micro.batch)[1].flatten().nonzero()[:, 0][source])

    def from_logits(self, batch: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """The same from the model's own whole logits."""
        candidates, rule = batch.target.dim() == 2, self._rule(batch.target, temperature)
        divisor: Tensor | float = rule.temperature
        if divisor != 1.0 and not candidates:
            divisor = torch.where(batch.echo_mask, 1.0, divisor)[:, None]
        logits = self._whole_logits(batch) / divisor
        if rule.truncates:
            logits = torch.where(batch.echo_mask[:, None], logits, kept_logits(logits, batch.target, rule))
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


def of_each(micro: PackedMicroBatch, values: Tensor) -> Tensor:
    """[S] values of the scored tokens -> [N] of the tokens of the loss."""
    each = micro.batch.each
    return values if each is None else take_rows(values, each)


class RoutingReplay:
    """Compare the learner's choice of experts with the sampler's, or replay the sampler's, in one model's passes.

    A router's scores differ between sampler and learner by rounding, and after an update by more. If another expert is
    among the best, the two compute different functions, and the importance ratio of the token is far from 1. With
    replay the learner uses the experts that the sampler used ("Rollout Routing Replay", R3). Their weights are the
    learner's own, so that the router is trained. A pass without recorded experts uses the model's own choice.
    """

    def __init__(self, model: Any, mode: RoutingMode) -> None:
        self._routing = ExpertRouting(model)
        self._replays = mode == "replay"
        self._sampled: Tensor | None = None  # [T, layers, k] of the current pass
        self._known: Tensor | None = None  # [T] bool: tokens with recorded experts
        self._differs: dict[int, Tensor] = {}  # by layer, [T] bool

    def use(self) -> AbstractContextManager[None]:
        """Forward and backward passes happen inside; recomputed layers choose as in the forward pass."""
        return self._routing.use(self._choose)

    def start(self, sampled: Tensor | None) -> None:
        """Set the sampler's experts [T, layers, k] of the next pass, in the order in which its tokens are computed."""
        shape = (self._routing.layers, self._routing.per_token)
        if sampled is not None and sampled.shape[1:] != shape:
            raise InputError(
                f"the recorded routing has (layers, experts a token) = {tuple(sampled.shape[1:])}, and the model "
                f"{shape}; rollouts of another model cannot be replayed"
            )
        self._sampled, self._differs = sampled, {}
        self._known = None if sampled is None else sampled[:, 0, 0] != torch.iinfo(sampled.dtype).max

    def _choose(self, layer: int, own: Tensor) -> Tensor:
        if self._sampled is None or self._known is None:
            return own
        sampled = self._sampled[:, layer].long()
        self._differs[layer] = (sampled.sort(-1).values != own.sort(-1).values).any(-1)
        if not self._replays:
            return own
        return torch.where(self._known[:, None], sampled, own)

    def mismatch(self, places: Tensor) -> tuple[Tensor, Tensor] | None:
        """(share of layers with other experts, summed over the tokens at `places`; tokens compared) of the pass."""
        if self._known is None:
            return None
        known = self._known[places]
        share = torch.stack(list(self._differs.values())).double().mean(0)[places]
        return (share * known).sum(), known.sum(dtype=torch.float64)


class FrozenModel:
    """Log-probabilities under weights that no step changes, at the temperature that the learner scores with."""

    def __init__(self, model: Any, *, config: RunConfig, pad_token_id: int = 0) -> None:
        self.model = model.requires_grad_(False).eval()
        temperature = config.rollout.temperature
        self._scorer = Scorer(model, compile_layers=False, temperature=temperature, pad_token_id=pad_token_id)
        self._device = next(model.parameters()).device
        whole_logits = self._scorer.mode == "reference"
        tokens = micro_batch_tokens(config, base_model(model).config, self._device, whole_logits=whole_logits)
        self._limit = MicroBatchLimit(tokens)

    @classmethod
    def copy_of(cls, model: Any, *, config: RunConfig, pad_token_id: int = 0) -> FrozenModel:
        """A model as it is now. Weights that are not trained, such as those under an adapter, are shared with it."""
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
        return cls(copy.deepcopy(model, shared), config=config, pad_token_id=pad_token_id)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Array:
        """[T] log-probabilities of the batch's tokens, or [M] of its targets."""

        def pack(rows: set[int] | None = None) -> PackedBatch:
            scorer = self._scorer
            options: dict[str, Any] = {"share_prefix": scorer.shares_prefix, "min_root": scorer.min_root}
            options |= {"max_tokens": self._limit.tokens, "rows": rows}
            return pack_batch(batch, echo=False, device=self._device, **options)

        def smaller(micros: Sequence[PackedMicroBatch]) -> PackedBatch:
            self._limit.halve(micros[0])
            return pack(rows_of(micros))

        def score(micro: PackedMicroBatch) -> Tensor:
            return of_each(micro, self._scorer(micro)[0])

        parts = score_all(self._scorer, score, pack(), smaller)
        self._limit.log_reduction()
        return tokens_to_column(parts, batch)
