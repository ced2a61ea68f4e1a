"""The learner's forward pass: a packed micro-batch in, log-probabilities of its scored tokens out.

`trees` computes packed rows that share their prompts, and never holds whole logits. `reference` pads every row and
takes the model's own logits: for models whose layers cannot be told who may see whom, or that do more to their
logits than the head knows. A self-check at load compares the two and chooses.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from palestra.algo.batching import MicroBatch
from palestra.algo.step_loss import LossGradient
from palestra.engine.lora import base_model
from palestra.learner.graphs import Graphs, can_be_captured
from palestra.learner.head import ScoringHead
from palestra.learner.last_layer import last_mlp_at
from palestra.learner.layers import decoder_layers
from palestra.learner.logit_rule import logit_rule
from palestra.learner.lora import compute_in_model_dtype
from palestra.learner.norms import FastNorms
from palestra.learner.packed import PackedMicroBatch
from palestra.learner.self_check import choose_mode
from palestra.learner.tree_attention import Layout, use_tree_attention

Mode = Literal["trees", "reference"]
WORTH_COMPILING = 50_000_000  # parameters; a smaller model's steps take less time than its compiler
MAX_RECOMPUTED_COLUMNS = 256  # a product over fewer, as those of adapters' ranks, is cheaper to repeat than to keep
FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit.default"
# What traced layers hold of ours, and the compiler's cache does not look into: the rule of what is kept, and attention.
TRACED_FILES = [Path(__file__), Path(__file__).with_name("tree_attention_cuda.py")]


class Scorer(nn.Module):
    """Log-probabilities of chosen tokens under one causal language model. Its forward is the root of every pass."""

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        pad_token_id: int = 0,
        compile_layers: bool | None = None,
        in_shards: bool = False,
        mode: Mode | None = None,
    ) -> None:
        """`compile_layers`: None compiles large models on a CUDA GPU, where it is soon worth the wait.

        `in_shards`: hooks around each layer will gather its weights, and must stay outside of what is compiled.
        `mode`: what was chosen for the same model before.
        """
        super().__init__()
        self.model = base_model(model)
        self.pad_token_id = pad_token_id
        self.head = ScoringHead(self.model.get_output_embeddings(), logit_rule(self.model, temperature))
        large = self.model.num_parameters() >= WORTH_COMPILING and self.model.device.type == "cuda"
        self.compiled = large if compile_layers is None else compile_layers
        self.in_shards = in_shards
        self.mode: Mode = mode or "trees"
        self._norms = FastNorms(self.model) if self.model.device.type == "cpu" else None
        self.graphs: Graphs | None = None
        if self.model.device.type == "cuda":
            compute_in_model_dtype(self.model)
        if mode is None:
            choose_mode(self)
        captures = self.mode == "trees" and self.compiled and not in_shards and can_be_captured(self.model)
        self.graphs = Graphs(self.model, self._layers) if captures else None

    @property
    def shares_prefix(self) -> bool:
        """Whether a micro-batch may hold trees of several rows."""
        return self.mode == "trees"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Forward and backward passes happen inside; the model is as it was afterwards."""
        norms = nullcontext() if self._norms is None else self._norms.use()
        with norms, use_tree_attention(self.model) if self.mode == "trees" else nullcontext():
            layers = decoder_layers(self.model) if self.compiled else []
            with _compiled_forwards(layers) if self.in_shards else _compiled_calls(layers):
                yield

    def forward(
        self, micro: PackedMicroBatch, *, entropy_gradient: bool = False, loss_gradient: LossGradient | None = None
    ) -> tuple[Tensor, Tensor]:
        """([N] log-probabilities, [N] entropies) of the micro-batch's scored tokens.

        Sampled tokens are scored at the temperature that they were sampled with, tool results at 1. `loss_gradient`
        saves memory and time where the loss is a sum over tokens.
        """
        if self.mode == "reference":
            return self.from_logits(micro.batch)
        hidden = self._packed_hidden(micro).index_select(0, micro.layout.computed_at(micro.batch.source))
        target = micro.batch.target
        if not len(micro.echo) or self.head.rule.temperature == 1.0:
            return self.head(hidden, target, entropy_gradient=entropy_gradient, loss_gradient=loss_gradient)
        parts = [
            self.head(hidden[chosen], target[chosen], temperature=temperature, entropy_gradient=entropy_gradient)
            for chosen, temperature in ((micro.policy, None), (micro.echo, 1.0))
        ]
        order = torch.cat([micro.policy, micro.echo]).argsort()
        logprobs, entropies = (torch.cat(both)[order] for both in zip(*parts, strict=True))
        return logprobs, entropies

    def _packed_hidden(self, micro: PackedMicroBatch) -> Tensor:
        """[T, H] in the layout's order; right at the places that the batch reads."""
        batch, layout = micro.batch, micro.layout
        ids, positions = layout.reorder(batch.token_ids), layout.reorder(batch.position_ids)
        if self.graphs is not None and layout.bounds.shape is not None and torch.is_grad_enabled():
            return self.graphs.hidden(ids, positions, layout)
        # A compiled or recomputed layer must be the same each time.
        again = self.compiled or self.model.is_gradient_checkpointing
        layers = [] if again or self.model.device.type != "cpu" else decoder_layers(self.model)
        with last_mlp_at(layers, batch.source, len(batch.token_ids)):
            return self._layers(ids, positions, layout)

    def _layers(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        out = self.model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def from_logits(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The same from the model's own whole logits."""
        ids, mask = self._pad(batch)
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[mask]
        temperature: Tensor | float = self.head.rule.temperature
        if temperature != 1.0:
            temperature = torch.where(batch.echo_mask, 1.0, temperature)[:, None]
        logp = torch.log_softmax(logits.index_select(0, batch.source).float() / temperature, dim=-1)
        return -nn.functional.nll_loss(logp, batch.target, reduction="none"), -(logp.exp() * logp).sum(-1)

    def _pad(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[B, L] ids padded on the right and [B, L] bool where they are real; every tree is one row."""
        rows = batch.token_ids.split([tree.length for tree in batch.trees])
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=self.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


@contextmanager
def _compiled_calls(layers: list[nn.Module]) -> Iterator[None]:
    """Each layer's call is compiled inside, with the hooks around it."""
    for layer in layers:
        layer._compiled_call_impl = partial(_call_alike, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def _call_alike(layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The first trained layer over frozen embeddings needs no gradient of its input: the others' program serves."""
    if torch.is_grad_enabled() and not hidden.requires_grad and any(p.requires_grad for p in layer.parameters()):
        hidden = hidden.detach().requires_grad_()
    return _compiled_layer(with_hooks=True)(layer, hidden, *args, **kwargs)


@contextmanager
def _compiled_forwards(layers: list[nn.Module]) -> Iterator[None]:
    """Each layer's forward is compiled inside, without the hooks around it."""
    for layer in layers:
        layer.__dict__["forward"] = partial(_compiled_layer(with_hooks=False), layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


@cache
def _compiled_layer(*, with_hooks: bool) -> Callable[..., Any]:
    """Runs a layer compiled: for any length, since every micro-batch has its own, and once for all layers.

    Of its activations only the products' and the attention's are kept; the cheap steps between them are computed again
    in the backward pass, fused into what needs them. Two layers as one program take as long, and compile twice as long.
    """
    keep = _checkpoint_contexts()

    def call(layer: nn.Module, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        run = layer._call_impl if with_hooks else partial(type(layer).forward, layer)
        if torch.is_grad_enabled():
            return checkpoint(run, hidden, *args, use_reentrant=False, context_fn=keep, **kwargs)
        return run(hidden, *args, **kwargs)

    return _compiled(call)


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    # It warns of in-place operations inside of checkpoints, which these layers do not have: the self-check would fail.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    return torch.compile(call, dynamic=True, options=_compiler_options())


def _compiler_options() -> dict[str, Any]:
    """One program for micro-batches of every size: what compiles in the middle of a run holds it up for long."""
    from torch._inductor import config

    if torch.cuda.is_available():
        # Before anything else the compiler tries which vector instructions C++ code may use, and takes half a minute
        # for it. Layers on a GPU have no such code.
        config.cpp.vec_isa_ok = False
    # Padding would compile again for lengths that are no multiple of 8; the weights' sides are aligned anyway.
    options: dict[str, Any] = {"shape_padding": False}
    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):
        # Else the gradient of norms is fused from 5 Mi numbers on alone, which makes two programs.
        options["triton.mix_order_reduction_non_strict_mode"] = True
    return options


def _checkpoint_contexts() -> Any:
    """By `cache_hash` the compiler finds on disk what an earlier process traced, unless these files have changed."""
    contexts = partial(create_selective_checkpoint_contexts, _what_to_keep)
    contexts.cache_hash = hashlib.sha256(b"".join(map(Path.read_bytes, TRACED_FILES))).hexdigest()  # type: ignore[attr-defined]
    return contexts


def _what_to_keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention, but not what an adapter adds: made from few columns, and wide as the layer."""
    if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        costly = args[-2].shape[1] > MAX_RECOMPUTED_COLUMNS
    else:
        costly = operation is torch.ops.palestra.tree_attention.default or str(operation) == FOUR_BIT_PRODUCT
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE
