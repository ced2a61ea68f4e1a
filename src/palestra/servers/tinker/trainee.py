"""One model that a client trains: gradients accumulate over requests until an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import MicroBatch, Tree
from palestra.core.config_sections import TrainSection
from palestra.core.errors import PalestraError
from palestra.core.types import Array
from palestra.learner import state as learner_state
from palestra.learner.forward import Scorer
from palestra.learner.optimizer import Optimizer
from palestra.learner.packed import PackedMicroBatch
from palestra.learner.tree_attention import Layout
from palestra.servers.tinker.base_model import AdapterSpec, BaseModel
from palestra.servers.tinker.losses import INPUTS, SCALED_BY, token_losses
from palestra.servers.tinker.messages import Datum

# No more on a large GPU, as the learner has: models and samplers share it, and a pass that is too large for its memory
# is not repeated in parts.
TOKENS_PER_PASS = 16384
MAX_CELLS = 1 << 24  # of one row's targets; a sparse matrix may claim any size
WORTH_SHARING = 8  # tokens of a common beginning


@dataclass(frozen=True, slots=True)
class AdamParams:
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float  # 0: no clipping


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of one forward_backward: the log-probabilities of each row's targets, [T] or [T, K], and the summed loss."""

    logprobs: list[Array]
    loss: float


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rows that are computed together."""

    micro: PackedMicroBatch
    each: Tensor  # [N] which of the micro-batch's scored tokens a target is
    row: Tensor  # [N] which row it belongs to
    inputs: dict[str, Tensor]  # [N] each: what the loss reads


class Trainee:
    """A base model with one adapter (or a whole copy of it), and its optimizer. One thread calls it at a time.

    `rows_per_pass` says how many rows are computed together. With 1 a gradient is the same to the bit however the
    client splits its rows over requests; more are faster where rows are short.
    """

    def __init__(self, base: BaseModel, spec: AdapterSpec, *, seed: int = 0, rows_per_pass: int = 1) -> None:
        self.base = base
        self.spec = spec
        self.version = 0  # grows with each change of the weights
        self._rows_per_pass = rows_per_pass
        self._model: Any = base.module(spec, seed).train()
        self._scorer = Scorer(self._model, pad_token_id=base.tokenizer.pad_token_id or 0)
        self._optimizer = Optimizer(self._model, TrainSection(), master_weights=not spec.rank)
        self._failure = ""  # why gradients of this step were lost

    def check(self, data: Sequence[Datum], loss_fn: str) -> None:
        """Refuse rows that could not be computed, before any of them is."""
        needed = ("target_tokens", *INPUTS[loss_fn])
        for i, datum in enumerate(data):
            length = len(datum.token_ids)
            if not 0 < length <= self.base.context:
                raise PalestraError(f"datum {i} has {length} tokens; the model takes 1 to {self.base.context}")
            if missing := [name for name in needed if name not in datum.inputs]:
                raise PalestraError(f"datum {i} lacks loss_fn_inputs[{missing[0]!r}], which {loss_fn} needs")
            if unknown := [name for name in datum.inputs if name not in needed]:
                raise PalestraError(f"datum {i} has loss_fn_inputs[{unknown[0]!r}], which {loss_fn} does not read")
            targets = datum.inputs["target_tokens"]
            if targets.shape[0] != length:
                raise PalestraError(f"datum {i} has {length} input tokens and {targets.shape[0]} target_tokens")
            if math.prod(targets.shape) > MAX_CELLS:
                raise PalestraError(
                    f"datum {i}: target_tokens has the shape {list(targets.shape)}, and the answer a logprob for each "
                    f"cell; at most {MAX_CELLS} are answered"
                )
            for name in needed[1:]:
                other = datum.inputs[name]
                if other.shape != targets.shape or not np.array_equal(other.places, targets.places):
                    shapes = f"{list(other.shape)}, target_tokens {list(targets.shape)}"
                    raise PalestraError(f"datum {i}: loss_fn_inputs[{name!r}] has the shape {shapes}; they must agree")
            for name, ids in (("model_input", datum.token_ids), ("target_tokens", targets.values)):
                if ids.dtype.kind != "i":
                    raise PalestraError(f"datum {i}: {name} holds {ids.dtype} values; token ids are integers")
                if len(ids) and not (ids.min() >= 0 and ids.max() < self.base.vocabulary):
                    wrong = next(int(t) for t in ids if not 0 <= t < self.base.vocabulary)
                    raise PalestraError(
                        f"datum {i}: token id {wrong} in {name} is outside the vocabulary "
                        f"0..{self.base.vocabulary - 1}; use the model's own tokenizer"
                    )

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], *, backward: bool = True
    ) -> Outputs:
        """The loss of these rows; its gradient is accumulated, unless only the forward pass was asked for."""
        self.check(data, loss_fn)
        logprobs: list[Tensor] = []  # on the device, so that no pass waits for the one before
        losses: list[Tensor] = []
        try:
            with self._scorer.session():
                for rows in self._passes(data):
                    packed = self._pack(rows, INPUTS[loss_fn])
                    trains = backward and has_gradient(loss_fn, rows)
                    with torch.set_grad_enabled(trains):
                        found = self._scorer(packed.micro)[0].index_select(0, packed.each)
                        loss = token_losses(loss_fn, settings, found, packed.inputs, packed.row).sum()
                    if trains:
                        self._optimizer.gather()
                        loss.backward()
                    losses.append(loss.detach().double())
                    logprobs.append(found.detach().float())
            if backward and data:
                self._optimizer.fill()
            values = torch.cat(logprobs).cpu().numpy() if logprobs else np.empty(0, np.float32)
            total = float(torch.stack(losses).sum()) if losses else 0.0
        except BaseException as error:
            if backward:  # what part of it was added is not known any more
                self._optimizer.clear()
                self._failure = f"{type(error).__name__}: {error}"
            raise
        return Outputs(_by_row(values, data), total)

    def optim_step(self, adam: AdamParams) -> float:
        """One AdamW update; gives the gradient's norm before clipping. Without a gradient nothing changes."""
        if self._failure:
            failure, self._failure = self._failure, ""
            raise PalestraError(f"a forward_backward of this step failed ({failure}), so its gradients are gone")
        optimizer = self._optimizer
        if all(master.grad is None for master in optimizer.masters):
            return 0.0
        norm = float(optimizer.clip(adam.grad_clip_norm or math.inf))
        if not math.isfinite(norm):
            optimizer.clear()
            raise PalestraError(
                f"the gradient norm is {norm}, expected a finite number; the weights are unchanged. Look for infinite "
                "advantages or logprobs, or lower the learning rate"
            )
        optimizer.configure((adam.beta1, adam.beta2), adam.eps, adam.weight_decay)
        optimizer.step(adam.learning_rate)
        self.version += 1
        return norm

    def gradient(self) -> dict[str, Tensor]:
        """The gradients accumulated since the last step, by the names of the weights."""
        named = [(name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad]
        pairs = zip(named, self._optimizer.masters, strict=True)
        return {name: master.grad for (name, _), master in pairs if master.grad is not None}

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the trained weights as they are now, which other threads may read."""
        copies = {name: w.detach().clone() for name, w in self._model.named_parameters() if w.requires_grad}
        if self.base.device.type == "cuda":
            torch.cuda.current_stream(self.base.device).synchronize()
        return copies

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write the adapter (or all weights), as peft and transformers read it, and the optimizer's state."""
        if optimizer:
            learner_state.save(folder, self._model, {"optimizer": self._optimizer.state_dict()})
        else:
            learner_state.save_model(folder, self._model)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote; without the optimizer's state it begins anew. Gathered gradients are forgotten."""
        if optimizer:
            state = learner_state.load(folder, self._model)
            self._optimizer.load_state_dict(state["optimizer"])
        else:
            learner_state.load_model(folder, self._model)
            self._optimizer.reset()
        self._optimizer.clear()
        self._failure = ""
        self.version += 1

    def _passes(self, data: Sequence[Datum]) -> Iterator[Sequence[Datum]]:
        """The rows in runs that are computed together."""
        start = tokens = 0
        for i, datum in enumerate(data):
            length = len(datum.token_ids)
            if i > start and (i - start >= self._rows_per_pass or tokens + length > TOKENS_PER_PASS):
                yield data[start:i]
                start, tokens = i, 0
            tokens += length
        if data:
            yield data[start:]

    def _pack(self, rows: Sequence[Datum], names: Sequence[str]) -> _Packed:
        """The rows' tokens, prompts that neighbours share once, and what the loss reads of every target."""
        tokens: list[Array] = []
        positions: list[Array] = []
        trees: list[Tree] = []
        source: list[Array] = []
        start = 0
        for shared, family in _families([datum.token_ids for datum in rows], share=self._scorer.shares_prefix):
            own = [ids[shared:] for ids in family]
            tokens += [family[0][:shared], *own]
            positions += [np.arange(shared), *(np.arange(shared, len(ids)) for ids in family)]
            trees.append(Tree(start, shared, tuple(len(ids) for ids in own)))
            at = start + shared
            for ids in own:
                source.append(np.concatenate([np.arange(start, start + shared), np.arange(at, at + len(ids))]))
                at += len(ids)
            start = at
        targets = [datum.inputs["target_tokens"] for datum in rows]
        places = [target.places for target in targets]
        widths = [target.shape[1] if len(target.shape) == 2 else 1 for target in targets]
        predicted_from = [s[place // width] for s, place, width in zip(source, places, widths, strict=True)]
        ids = np.concatenate([target.values for target in targets])
        # Of a shared prompt each target is scored once, too.
        keys, each = np.unique(np.concatenate(predicted_from) * self.base.vocabulary + ids, return_inverse=True)
        count, device = len(keys), self.base.device
        numbers, ones = torch.arange(count), torch.ones(count, dtype=torch.bool)
        batch = MicroBatch(
            token_ids=_tensor(tokens).long(),
            position_ids=_tensor(positions),
            trees=tuple(trees),
            source=torch.from_numpy(keys // self.base.vocabulary),
            target=torch.from_numpy(keys % self.base.vocabulary),
            row=torch.zeros_like(numbers),
            place=numbers,
            policy_mask=ones,
            echo_mask=~ones,
            sampler_logprobs=torch.zeros(count),
            advantages=torch.zeros(count),
        )
        every, layout = numbers.to(device), Layout(batch.trees, device)
        micro = PackedMicroBatch(batch.to(device), every, every[:0], layout, batch.row.numpy(), batch.place.numpy())
        row = np.repeat(np.arange(len(rows)), [len(place) for place in places])
        inputs = {name: _tensor([d.inputs[name].values for d in rows]).float().to(device) for name in names}
        return _Packed(micro, torch.from_numpy(each).to(device), torch.from_numpy(row).to(device), inputs)


def has_gradient(loss_fn: str, rows: Sequence[Datum]) -> bool:
    """False where all advantages (or weights) are 0, as those of a group with equal rewards: no need to go backward."""
    counts = SCALED_BY.get(loss_fn)
    return counts is None or any(np.any(row.inputs[counts].values) for row in rows)


def _families(rows: Sequence[Array], *, share: bool) -> Iterator[tuple[int, list[Array]]]:
    """(length of their common beginning, rows) of neighbours that have one; 0 for a row by itself."""
    family: list[Array] = []
    shared = 0
    for ids in rows:
        common = min(_common_length(family[0], ids), shared) if family else 0
        common = min(common, len(ids) - 1)  # each keeps a token of its own
        costs = len(family) * (shared - common) if len(family) > 1 else 0  # tokens that were shared till now
        if share and family and common >= max(WORTH_SHARING, costs):
            family.append(ids)
            shared = common
            continue
        if family:
            yield shared if len(family) > 1 else 0, family
        family, shared = [ids], len(ids) - 1
    if family:
        yield shared if len(family) > 1 else 0, family


def _common_length(a: Array, b: Array) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _tensor(parts: Sequence[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _by_row(values: Array, rows: Sequence[Datum]) -> list[Array]:
    """The values of all targets as one array a row, of its targets' shape; 0 in cells that a sparse one leaves out."""
    targets = [datum.inputs["target_tokens"] for datum in rows]
    parts = np.split(values, np.cumsum([len(target.values) for target in targets])[:-1])
    out = []
    for target, part in zip(targets, parts, strict=True):
        flat = np.zeros(math.prod(target.shape), np.float32)
        flat[target.places] = part
        out.append(flat.reshape(target.shape))
    return out
