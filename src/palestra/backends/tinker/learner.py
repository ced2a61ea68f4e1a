"""The learner whose model is on a Tinker server: the hosted service, or `palestra tinker`."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tinker import types

from palestra.algo.step_loss import StepLoss
from palestra.backends.tinker.losses import (
    StepTerms,
    echo_gradients,
    needs_forward,
    server_loss,
    step_terms,
    weighted_advantages,
)
from palestra.backends.tinker.model import ModelChange, Sampler, TinkerModel
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.event_loop import outside_event_loop
from palestra.core.files import write_json
from palestra.core.types import Array, Sample
from palestra.core.weights import Weights, saved_tensors
from palestra.learner.base import Batch, nothing

CHECKPOINT = "tinker.json"
_ADAM_EPS = 1e-8  # as the local optimizer
_NO_NORM = "the gradient norm is"  # how `palestra tinker` begins to say that it is not finite
LossName = Literal["cross_entropy", "ppo", "cispo"]


@dataclass(frozen=True, slots=True)
class TinkerWeights(Weights):
    """Weights that stay on the server; reading their tensors downloads them."""

    sampler: Sampler | None = None


@dataclass(slots=True)
class TinkerOutputs:
    """The answers of one forward_backward; asking for them waits."""

    batch: Batch
    loss: StepLoss
    answer: Callable[[ModelChange], Any]
    sent: list[int]  # which samples
    changes: list[ModelChange]  # the first has the logprobs of all
    found: list[Array] | None = None
    computed: StepTerms | None = None

    def logprobs(self) -> list[Array]:
        if self.found is None:
            answers = [self.answer(change) for change in self.changes]
            rows = answers[0].loss_fn_outputs if answers else []
            self.found = read_logprobs(rows, self.batch.samples, self.sent, echo=self.loss.echo_tokens > 0)
        return self.found

    def entropies(self) -> list[Array]:
        """The service does not report them."""
        return [np.full(len(sample.token_ids), np.nan, dtype=np.float32) for sample in self.batch.samples]

    @property
    def terms(self) -> StepTerms:
        if self.computed is None:
            self.computed = step_terms(self.batch, self.loss, self.logprobs())
        return self.computed

    def metrics(self) -> dict[str, float]:
        policy, echo = self.terms.policy, self.terms.echo
        metrics = {"loss": policy + self.loss.echo_coefficient * echo, "policy_loss": policy}
        if self.loss.echo_tokens:
            metrics["echo_loss"] = echo
        metrics["tokens_computed"] = float(sum(len(self.batch.samples[i].token_ids) for i in self.sent))
        return metrics | self.terms.stats.finish()


class TinkerLearner:
    """Trains a model on a Tinker server. Logprobs are at temperature 1: the server knows no other.

    Requests are sent as soon as they are made and waited for when an answer is needed, so that a gradient and its
    optimizer step share one round of the server.
    """

    def __init__(self, model: TinkerModel, *, config: RunConfig) -> None:
        self.model = model
        self._base_model = config.model.name
        self._train = config.train
        self._pending: list[TinkerOutputs] = []
        self._saved: dict[str, str] = {}  # the tinker:// path of each checkpoint of this learner, by its folder

    def forward(self, batch: Batch, *, reference: bool = False) -> list[Array]:
        if reference:
            return self._reference_logprobs(batch)
        sent = trained_rows(batch.samples, echo=False)
        if not sent:
            return read_logprobs([], batch.samples, sent, echo=False)
        zeros = [np.zeros(len(s.token_ids)) for s in batch.samples]
        data = datums(batch.samples, sent, {"weights": zeros})
        answer = self.model.call(lambda client: client.forward(data, "cross_entropy"))
        return read_logprobs(answer.loss_fn_outputs, batch.samples, sent, echo=False)

    def forward_backward(self, batch: Batch, loss: StepLoss) -> TinkerOutputs:
        if loss.entropy_coefficient:
            raise PalestraError(
                f"entropy_coefficient = {loss.entropy_coefficient}: a Tinker server gives the logprobs of tokens, not "
                "the entropy of their distributions; set train.entropy_coefficient to 0"
            )
        found = TinkerOutputs(batch, loss, self.model.answer, trained_rows(batch.samples, loss.echo_tokens > 0), [])
        try:
            if found.sent:
                found.changes = [self._send(data, name, clip) for name, clip, data in self._passes(batch, loss, found)]
        except BaseException:
            self._forget()
            raise
        self._pending.append(found)
        return found

    def optim_step(
        self, learning_rate: float, *, max_grad_norm: float, meanwhile: Callable[[], None] = nothing
    ) -> float:
        pending, self._pending = [found for found in self._pending if found.changes], []
        if not pending:
            return 0.0
        adam = types.AdamParams(
            learning_rate=learning_rate,
            beta1=self._train.adam_beta1,
            beta2=self._train.adam_beta2,
            eps=_ADAM_EPS,
            weight_decay=self._train.weight_decay,
            grad_clip_norm=max_grad_norm,
        )
        gradients = [change for found in pending for change in found.changes]
        step = self.model.change(lambda client: client.optim_step(adam), is_step=True)
        try:
            meanwhile()
            if not all(found.terms.is_finite for found in pending):
                raise _not_finite(pending, "the loss is nan")
            norm = self._step_norm(step)
            if math.isinf(norm):
                raise _not_finite(pending, "the gradient norm is inf or nan")
        except PalestraError:
            self.model.undo([*gradients, step])
            raise
        return norm

    def _step_norm(self, step: ModelChange) -> float:
        """The gradient's norm; inf where it was none, which `palestra tinker` refuses to use."""
        try:
            return gradient_norm(self.model.answer(step).metrics or {})
        except PalestraError as error:
            if _NO_NORM in str(error):
                return math.inf
            raise

    def weights(self, version: int) -> TinkerWeights:
        return TinkerWeights(version, self._read_tensors, sampler=self.model.sampler(version))

    def save(self, folder: Path) -> None:
        """The state stays on the server; the folder has its path. States whose folder is gone are deleted there."""
        name = folder.name.strip(".").removesuffix(".partial")
        saved = {str(folder.with_name(name)): self.model.save(name)}
        for path, state in self._saved.items():
            if Path(path).exists():
                saved[path] = state
            else:
                self.model.delete(state)
        self._saved = saved
        write_json(folder / CHECKPOINT, {"state": self.model.state, "base_model": self._base_model})

    def load(self, folder: Path) -> None:
        self._pending = []
        self.model.load(read_state(folder))

    def export(self, folder: Path) -> Path:
        return self.model.download(folder)

    def _passes(
        self, batch: Batch, loss: StepLoss, found: TinkerOutputs
    ) -> list[tuple[LossName, Mapping[str, float], list[types.Datum]]]:
        """What to send: one pass of the server's own loss and one for ECHO, or one pass with the whole gradient."""
        samples, sent = batch.samples, found.sent
        if native := server_loss(loss.objective, batch):
            assert batch.old_logprobs is not None
            advantages = _require_finite(weighted_advantages(loss, samples), samples)
            inputs = {"advantages": advantages, "logprobs": [np.nan_to_num(old) for old in batch.old_logprobs]}
            passes: list[Any] = [(native.name, native.config, datums(samples, sent, inputs))]
            if loss.echo_tokens:
                weights = [-row for row in echo_gradients(loss, samples)]
                passes.append(("cross_entropy", {}, datums(samples, sent, {"weights": weights})))
            return passes
        if needs_forward(loss.objective, batch):
            logprobs = self.forward(batch)
        else:  # the gradient is the same whatever they are
            logprobs = [np.zeros(len(s.token_ids), dtype=np.float32) for s in samples]
        weights = [-row for row in _require_finite(step_terms(batch, loss, logprobs).gradients, samples)]
        return [("cross_entropy", {}, datums(samples, sent, {"weights": weights}))]

    def _send(self, data: list[types.Datum], name: LossName, config: Mapping[str, float]) -> ModelChange:
        return self.model.change(lambda client: client.forward_backward(data, name, dict(config) or None))

    def _forget(self) -> None:
        """No gradient is left behind, nor what had gathered before."""
        changes = [change for found in self._pending for change in found.changes]
        self._pending = []
        if changes:
            self.model.undo(changes)

    def _reference_logprobs(self, batch: Batch) -> list[Array]:
        """Under the base model, by its sampler: the adapter of the beginning changes nothing."""
        if not self._train.beta:
            raise PalestraError(
                "train.beta > 0 but the learner was built without it; set it in the config from the start"
            )
        sent = trained_rows(batch.samples, echo=False)
        prompts = [types.ModelInput.from_ints(batch.samples[i].token_ids.tolist()) for i in sent]
        base = self.model.reference(self._base_model)

        def ask(prompt: types.ModelInput) -> Callable[[], Any]:
            return lambda: base.client.compute_logprobs(prompt)

        async def score() -> list[list[float | None]]:
            return await asyncio.gather(*(self.model.call_async(ask(prompt)) for prompt in prompts))

        rows = [np.full(len(s.token_ids), np.nan, dtype=np.float32) for s in batch.samples]
        for i, found in zip(sent, outside_event_loop(lambda: asyncio.run(score())), strict=True):
            rows[i] = np.where(batch.samples[i].policy_mask, np.array(found, dtype=np.float32), np.nan)
        return rows

    def _read_tensors(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return saved_tensors(self.model.download(Path(folder)))


def trained_rows(samples: Sequence[Sample], echo: bool) -> list[int]:
    """The samples that some loss reads."""
    return [i for i, s in enumerate(samples) if s.policy_mask[1:].any() or (echo and s.echo_mask[1:].any())]


def datums(samples: Sequence[Sample], rows: Sequence[int], inputs: Mapping[str, Sequence[Array]]) -> list[types.Datum]:
    """Token i predicts token i + 1, so that every input is shifted by one."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(samples[i].token_ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": samples[i].token_ids[1:].astype(np.int64)}
            | {name: values[i][1:].astype(np.float32) for name, values in inputs.items()},
        )
        for i in rows
    ]


def read_logprobs(outputs: Sequence[Any], samples: Sequence[Sample], rows: Sequence[int], *, echo: bool) -> list[Array]:
    """[T] for each sample; NaN at tokens that no loss reads."""
    found = [np.full(len(s.token_ids), np.nan, dtype=np.float32) for s in samples]
    for i, output in zip(rows, outputs, strict=True):
        values = np.asarray(output["logprobs"].data, dtype=np.float32)
        read = samples[i].policy_mask | samples[i].echo_mask if echo else samples[i].policy_mask
        found[i][1:] = np.where(read[1:], values, np.nan)
    return found


def gradient_norm(metrics: Mapping[str, float]) -> float:
    """The gradient's norm before clipping, by its name on the server; NaN where it is not reported."""
    names = [name for name in metrics if "grad" in name and ("norm" in name or "l2" in name)]
    return float(metrics[min(names, key=len)]) if names else math.nan


def read_state(folder: Path) -> str:
    """The tinker:// path of a checkpoint."""
    try:
        return str(json.loads((folder / CHECKPOINT).read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PalestraError(
            f"{folder} has no state of a Tinker server ({CHECKPOINT}: {error}); the run was trained by another backend"
        ) from None


def _require_finite(rows: list[Array], samples: Sequence[Sample]) -> list[Array]:
    bad = sorted({s.group for s, row in zip(samples, rows, strict=True) if not np.isfinite(row).all()})
    if bad:
        raise PalestraError(_sentence(bad, "the loss is nan"))
    return rows


def _not_finite(pending: Sequence[TinkerOutputs], what: str) -> PalestraError:
    """Names the groups whose loss is no number, or the one with the largest."""
    losses = [
        (abs(float(value)), sample.group)
        for found in pending
        for sample, value in zip(found.batch.samples, found.terms.row_losses, strict=True)
    ]
    groups = {group for value, group in losses if not math.isfinite(value)}
    return PalestraError(_sentence(sorted(groups or {max(losses)[1]}), what))


def _sentence(groups: Sequence[int], what: str) -> str:
    return (
        f"group {', '.join(map(str, groups))}: {what}, expected a finite number; the weights are unchanged. "
        "Lower train.learning_rate"
    )
