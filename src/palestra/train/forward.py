"""The learner's forward pass: a packed micro-batch in, log-probabilities of its scored tokens out.

Three ways, the best that the model allows: `trees` (packed, prompts shared), `padded` (one row a
sequence, for models whose layers cannot be told who may see whom), `logits` (for models that do
more to their logits than the head knows). A self-check on a few tokens picks the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from palestra.algo.batching import MicroBatch, pack
from palestra.core.types import Sample
from palestra.train.attention import Layout, use_tree_attention
from palestra.train.head import LogitRule, score_tokens

log = logging.getLogger(__name__)

Way = Literal["trees", "padded", "logits"]
# Largest difference in a log-probability that rounding explains.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm")


class Scorer:
    """Log-probabilities of chosen tokens under one causal language model."""

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, pad_token_id: int = 0, compile_layers: bool | None = None
    ) -> None:
        """`compile_layers`: None compiles on a CUDA GPU only."""
        self.model = causal_lm(model)
        self.pad_token_id = pad_token_id
        self.rule = logit_rule(self.model, temperature)
        self.way: Way = "trees"
        self._layouts: dict[int, Layout] = {}
        self._compiled: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.way = self._choose_way()
        on_gpu = self.model.device.type == "cuda"
        if self.way == "trees" and (on_gpu if compile_layers is None else compile_layers):
            self._compiled = [(layer, partial(_run_compiled, layer)) for layer in _layers(self.model)]

    @property
    def shares_prefix(self) -> bool:
        """Whether a micro-batch may hold trees of several rows."""
        return self.way == "trees"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Forward and backward passes happen inside; the model is as it was afterwards."""
        with use_tree_attention(self.model) if self.way == "trees" else nullcontext():
            for layer, call in self._compiled:
                layer._compiled_call_impl = call  # type: ignore[assignment]
            try:
                yield
            finally:
                self._layouts.clear()
                for layer, _ in self._compiled:
                    layer._compiled_call_impl = None

    def __call__(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """([N] log-probabilities, [N] entropies) of the micro-batch's scored tokens."""
        if self.way == "logits":
            return self._from_logits(batch)
        hidden = self._packed_hidden(batch) if self.way == "trees" else self._padded_hidden(batch)
        head = self.model.get_output_embeddings()
        return score_tokens(
            hidden.index_select(0, batch.source),
            head.weight,
            getattr(head, "bias", None),
            batch.target,
            self.rule,
            entropy_gradient=entropy_gradient,
        )

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Copy what the micro-batches of a session need to the device, so that no pass waits for it later."""
        if self.way == "trees":
            self._layouts.update({id(batch): Layout(batch.trees, batch.token_ids.device) for batch in batches})

    def _packed_hidden(self, batch: MicroBatch) -> Tensor:
        """[T, H] in packed order."""
        if id(batch) not in self._layouts:
            self.prepare([batch])
        out = self.model.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            layout=self._layouts[id(batch)],
        )
        return out.last_hidden_state[0]

    def _padded_hidden(self, batch: MicroBatch) -> Tensor:
        ids, mask = self._pad(batch)
        out = self.model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        return out.last_hidden_state[mask]

    def _from_logits(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        ids, mask = self._pad(batch)
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[mask]
        logp = torch.log_softmax(logits.index_select(0, batch.source).float() / self.rule.temperature, dim=-1)
        return logp.gather(-1, batch.target[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)

    def _pad(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[B, L] ids padded on the right and [B, L] bool where they are real; every tree is one row."""
        rows = batch.token_ids.split([tree.length for tree in batch.trees])
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=self.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]

    @torch.no_grad()
    def _choose_way(self) -> Way:
        """The first way whose numbers are the model's own on a small input."""
        training = self.model.training
        self.model.eval()
        try:
            shared, apart = _probe(self.model.get_input_embeddings().weight)
            self.way = "logits"
            expected = self._from_logits(apart)[0]
            reasons: dict[Way, str | None] = {}
            ways: tuple[Way, ...] = ("trees", "padded")
            for way in ways:
                self.way = way
                reasons[way] = self._mismatch(shared if way == "trees" else apart, expected)
                if reasons[way] is None:
                    if way != "trees":
                        log.warning("the learner computes padded rows, prompts not shared: %s", reasons["trees"])
                    return way
            log.warning("the learner computes whole logits, which takes more memory: %s", reasons["padded"])
            return "logits"
        finally:
            self.model.train(training)

    def _mismatch(self, batch: MicroBatch, expected: Tensor) -> str | None:
        """Why this way cannot be used, or None."""
        name = type(self.model).__name__
        if not isinstance(self.model.get_output_embeddings(), nn.Linear):
            return f"the output layer of {name} is not a plain linear layer"
        if self.way == "trees":
            kinds = [str(k) for k in getattr(self.model.config, "layer_types", None) or []]
            if recurrent := [k for k in kinds if any(word in k for word in RECURRENT)]:
                return f"{name} has {recurrent[0]} layers"
        try:
            with self.session():
                got = self(batch)[0]
        except Exception as error:  # whatever a foreign model raises, the plain way remains
            return f"{name} raised {type(error).__name__}: {error}"
        worst = float((got - expected).abs().max())
        allowed = TOLERANCE.get(self.model.dtype, 1e-3)
        return None if worst <= allowed else f"{name} differs by {worst:.2g} from its own logits on a small check"


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


def _layers(model: Any) -> list[nn.Module]:
    """The decoder's layers: all of one make, so that one compiled program serves them all."""
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    return list(max(stacks, key=len)) if stacks else []


@torch.compile
def _run_compiled(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def causal_lm(model: Any) -> Any:
    """The Hugging Face model itself, out of its adapter wrapper if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def logit_rule(model: Any, temperature: float) -> LogitRule:
    """What the model does to its logits after the output layer; temperature 0 trains at 1."""
    config = model.config
    multiplier = 1.0
    if scaling := getattr(config, "logits_scaling", None):
        multiplier = 1.0 / scaling
    elif scale := getattr(config, "logit_scale", None):
        multiplier = float(scale)
    return LogitRule(multiplier, getattr(config, "final_logit_softcapping", None), temperature or 1.0)
