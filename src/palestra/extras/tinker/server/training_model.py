"""One model that a client trains: gradients accumulate over requests until an optimizer step.

Tinker's losses are sums over tokens, without a mean; the client normalises. Their thresholds are bounds of the ratio
itself: 0.8 and 1.2 keep it within 20 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch, Targets
from palestra.algo.losses import TokenStats, row_sum
from palestra.algo.step_loss import Loss, LossTerms, LossTokens
from palestra.core.config import RunConfig
from palestra.core.config_sections import TrainSection
from palestra.core.errors import InputError, NotFiniteError, SettingError, StateError, UnsupportedError, did_you_mean
from palestra.core.types import Array
from palestra.extras.tinker.server.base_model import AdapterSpec, BaseModel
from palestra.extras.tinker.server.messages import Datum
from palestra.extras.tinker.server.requests import Adam
from palestra.learner import state as learner_state
from palestra.learner.local import LocalLearner
from palestra.learner.optimizer import Optimizer

_SAMPLED = ("logprobs", "advantages")
INPUTS = {  # beside target_tokens
    "cross_entropy": ("weights",),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "gspo": (*_SAMPLED, "sequence_ratio_mask"),
    "dro": _SAMPLED,
}
_CLIP = ("clip_low_threshold", "clip_high_threshold")
SETTINGS = {"ppo": dict(zip(_CLIP, (0.8, 1.2), strict=True)), "cispo": dict(zip(_CLIP, (0.0, 4.0), strict=True))}
NEEDED = {"gspo": _CLIP, "dro": ("beta",)}  # settings whose defaults at the hosted service are not published


def check_loss(loss_fn: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss with their defaults; raises for an unknown loss or setting."""
    if loss_fn not in INPUTS:
        raise UnsupportedError(
            f"loss_fn {loss_fn!r} is not served here; use one of {', '.join(INPUTS)}, or forward_backward_custom."
            f"{did_you_mean(loss_fn, INPUTS)}"
        )
    settings: dict[str, Any] = {**dict.fromkeys(NEEDED.get(loss_fn, ())), **SETTINGS.get(loss_fn, {})}
    for key, value in config.items():
        if key not in settings:
            knows = ", ".join(settings) or "none"
            raise SettingError(f"{loss_fn} has no setting {key!r} in loss_fn_config; it has {knows}")
        if not isinstance(value, float | int) or value != value:
            raise SettingError(f"loss_fn_config[{key!r}] of {loss_fn} is {value!r}; expected a number")
        settings[key] = float(value)
    for key, value in settings.items():
        if value is None:
            raise SettingError(f"{loss_fn} needs loss_fn_config[{key!r}] here: its default is not published")
    return settings


@dataclass(frozen=True, slots=True)
class TinkerLoss(Loss):
    """One of these losses over a batch's targets, with the settings that `check_loss` returns."""

    name: str
    settings: Mapping[str, float]

    def __call__(self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        losses = token_losses(self.name, self.settings, logprobs, tokens.inputs, tokens.row)
        return LossTerms(losses.sum()[None], losses.detach(), tokens.row, TokenStats())

    def has_gradient(self, batch: Batch, at: Array) -> bool:
        """False where all advantages (or weights) are 0, as those of a group with equal rewards."""
        assert batch.targets is not None
        # each token's loss, and so its gradient, is a multiple of this input; dro has a term beside it
        scale = batch.targets.inputs["weights" if self.name == "cross_entropy" else "advantages"]
        return self.name == "dro" or bool(np.any(scale[at]))


def token_losses(
    loss_fn: str,
    settings: Mapping[str, float],
    logprobs: Tensor,  # [N]
    inputs: Mapping[str, Tensor],  # [N] each
    row: Tensor | None = None,  # [N] int64, for losses that look at whole rows
) -> Tensor:
    """[N] the loss of each target, to be summed.

    >>> lp = torch.tensor([-0.5, -0.1], requires_grad=True)
    >>> inputs = {"logprobs": torch.tensor([-0.4, -0.2]), "advantages": torch.tensor([1.0, -1.0])}
    >>> token_losses("importance_sampling", {}, lp, inputs).sum().item()
    0.2003...
    """
    if loss_fn == "cross_entropy":
        return -inputs["weights"] * logprobs
    advantages, log_ratio = inputs["advantages"], logprobs - inputs["logprobs"]
    if loss_fn == "dro":
        return -(logprobs * advantages - 0.5 * settings["beta"] * log_ratio.square())
    if loss_fn == "gspo":
        assert row is not None
        mask, rows = inputs["sequence_ratio_mask"] != 0, int(row.max()) + 1 if len(row) else 0
        total = row_sum(log_ratio.detach() * mask, row, rows)
        count = row_sum(mask.to(log_ratio.dtype), row, rows)
        mean = (total / count.clamp(min=1.0))[row]  # [N] of each row's masked targets; 0 in a row without any
        log_ratio = mean + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(*(settings[key] for key in _CLIP))
    if loss_fn == "cispo":
        return -clipped.detach() * logprobs * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages)


# Not more on a large GPU, unlike a training that has it to itself: models and samplers share its memory.
TOKENS_PER_PASS = 16384
MAX_CELLS = 1 << 24  # of one row's targets; a sparse matrix may claim any size
WORTH_SHARING = 8  # tokens of a common beginning


@dataclass(frozen=True, slots=True)
class Outputs:
    """Result of a forward_backward: the log-probabilities of each row's targets, [T] or [T, K], and the summed loss."""

    logprobs: list[Array]
    loss: float


class TrainingModel:
    """A base model with one adapter (or a whole copy of it), and its optimizer. One thread calls it at a time.

    `rows_per_pass` says how many rows are computed together. With 1 a gradient is the same to the bit however the
    client splits its rows over requests; more are faster where rows are short.
    """

    def __init__(self, base: BaseModel, spec: AdapterSpec, *, seed: int = 0, rows_per_pass: int = 1) -> None:
        self.base = base
        self.spec = spec
        self.version = 0  # grows with each change of the weights
        self._model: Any = base.module(spec, seed).train()
        self._learner = LocalLearner(
            self._model,
            config=RunConfig.build({"rollout.temperature": 1.0, "train.tokens_per_micro_batch": TOKENS_PER_PASS}),
            pad_token_id=base.tokenizer.pad_token_id or 0,
            optimizer=Optimizer(self._model, TrainSection(), master_weights=not spec.rank),
            max_rows=rows_per_pass,
            shares_device=True,
        )
        self._optimizer = self._learner.optimizer
        self._failure = ""  # why gradients of this step were lost

    def check(self, data: Sequence[Datum], loss_fn: str) -> None:
        """Refuse rows that could not be computed, before any of them is."""
        needed = ("target_tokens", *INPUTS[loss_fn])
        for i, datum in enumerate(data):
            length = len(datum.token_ids)
            if not 0 < length <= self.base.context:
                raise InputError(f"datum {i} has {length} tokens; the model takes 1 to {self.base.context}")
            if missing := [name for name in needed if name not in datum.inputs]:
                raise InputError(f"datum {i} lacks loss_fn_inputs[{missing[0]!r}], which {loss_fn} needs")
            if unknown := [name for name in datum.inputs if name not in needed]:
                raise InputError(f"datum {i} has loss_fn_inputs[{unknown[0]!r}], which {loss_fn} does not read")
            targets = datum.inputs["target_tokens"]
            if targets.shape[0] != length:
                raise InputError(f"datum {i} has {length} input tokens and {targets.shape[0]} target_tokens")
            if math.prod(targets.shape) > MAX_CELLS:
                raise InputError(
                    f"datum {i}: target_tokens has the shape {list(targets.shape)}, and the answer a logprob for each "
                    f"cell; at most {MAX_CELLS} are answered"
                )
            for name in needed[1:]:
                other = datum.inputs[name]
                if other.shape != targets.shape or not np.array_equal(other.places, targets.places):
                    shapes = f"{list(other.shape)}, target_tokens {list(targets.shape)}"
                    raise InputError(f"datum {i}: loss_fn_inputs[{name!r}] has the shape {shapes}; they must agree")
                if not np.isfinite(other.values).all():
                    raise InputError(f"datum {i}: loss_fn_inputs[{name!r}] holds NaN or infinite values")
            for name, ids in (("model_input", datum.token_ids), ("target_tokens", targets.values)):
                if ids.dtype.kind != "i":
                    raise InputError(f"datum {i}: {name} holds {ids.dtype} values; token ids are integers")
                if len(ids) and not (ids.min() >= 0 and ids.max() < self.base.vocabulary):
                    wrong = next(int(t) for t in ids if not 0 <= t < self.base.vocabulary)
                    raise InputError(
                        f"datum {i}: token id {wrong} in {name} is outside the vocabulary "
                        f"0..{self.base.vocabulary - 1}; use the model's own tokenizer"
                    )

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], *, backward: bool = True
    ) -> Outputs:
        """The loss of these rows; its gradient is accumulated, unless only the forward pass was asked for."""
        self.check(data, loss_fn)
        if not data:
            return Outputs([], 0.0)
        loss, batch = TinkerLoss(loss_fn, settings), to_batch(data, INPUTS[loss_fn])
        if not backward:
            logprobs = self._learner.forward(batch)
            assert batch.targets is not None
            row = torch.from_numpy(np.repeat(np.arange(batch.rows), np.diff(batch.targets.offsets)))
            inputs = {name: torch.from_numpy(column) for name, column in batch.targets.inputs.items()}
            terms = loss(LossTokens(batch.rows, row, inputs), torch.from_numpy(logprobs), None).terms
            return Outputs(_by_row(logprobs, data), float(terms.sum()))
        try:
            outputs = self._learner.forward_backward(batch, loss)
            self._optimizer.zero_missing_gradients()
            return Outputs(_by_row(outputs.logprobs(), data), outputs.metrics()["loss"])
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def optim_step(self, adam: Adam) -> float:
        """One AdamW update; gives the gradient's norm before clipping. Without a gradient nothing changes."""
        if self._failure:
            failure, self._failure = self._failure, ""
            raise StateError(f"a forward_backward of this step failed ({failure}), so its gradients are gone")
        if not self._learner.has_pending:
            return 0.0
        self._optimizer.configure((adam.beta1, adam.beta2), adam.eps, adam.weight_decay)
        try:
            clip = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
            norm = self._learner.optim_step(adam.learning_rate, max_grad_norm=clip)
        except NotFiniteError as error:
            raise InputError(
                "the gradient norm is infinite or NaN, expected a finite number; the weights are unchanged. Look for "
                "very large advantages or logprobs, or lower the learning rate"
            ) from error
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
        copies = {name: weight.clone() for name, weight in self._learner.weights(self.version).tensors().items()}
        if self.base.device.type == "cuda":
            torch.cuda.current_stream(self.base.device).synchronize()
        return copies

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write the adapter (or all weights), as peft and transformers read it, and the optimizer's state."""
        if optimizer:
            self._learner.save(folder)
        else:
            learner_state.save_model(folder, self._model)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote; without `optimizer` its state is reset. Accumulated gradients are discarded."""
        if optimizer:
            self._learner.load(folder)
        else:
            learner_state.load_model(folder, self._model)
            self._optimizer.reset()
        self._learner.discard_gradients()
        self._failure = ""
        self.version += 1


def to_batch(data: Sequence[Datum], names: Sequence[str]) -> Batch:
    """The rows as the learner's batch: neighbours with a common beginning are a group, which computes it once."""
    targets = [datum.inputs["target_tokens"] for datum in data]
    places = [target.rows + 1 for target in targets]
    columns = {name: _flat([datum.inputs[name].values for datum in data], np.float32) for name in names}
    offsets = np.cumsum([0, *(len(target.values) for target in targets)])
    scored = Targets(_flat([target.values for target in targets], np.int64), _flat(places, np.int64), offsets, columns)
    rows = [datum.token_ids for datum in data]
    shared, counts = np.array(list(_families(rows))).T
    return Batch.of_targets(rows, scored, np.repeat(np.arange(len(counts)), counts), np.repeat(shared, counts))


def _flat(parts: Sequence[Array], kind: Any) -> Array:
    return np.concatenate([np.zeros(0, kind), *parts]).astype(kind, copy=False)


def _families(rows: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """(prefix length, number of rows) for neighbouring rows that share a prefix; length 0 for a single row."""
    first: Array = np.zeros(0, np.int32)
    shared = count = 0
    for ids in rows:
        length = min(len(first), shared, len(ids) - 1)  # each keeps a token of its own
        differ = np.flatnonzero(first[:length] != ids[:length])
        common = int(differ[0]) if len(differ) else length
        costs = count * (shared - common) if count > 1 else 0  # tokens that were shared till now
        if common >= max(WORTH_SHARING, costs):
            count, shared = count + 1, common
            continue
        if count:
            yield shared if count > 1 else 0, count
        first, shared, count = ids, len(ids) - 1, 1
    if count:
        yield shared if count > 1 else 0, count


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
