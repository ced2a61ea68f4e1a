"""Learner and policy of a model on a Tinker server: the hosted service, or `palestra tinker`.

The server knows the logprob of each token and no more, so a loss that is a function of logprobs is sent as its
gradient: cross-entropy with the weights −∂loss/∂logprob. On-policy, where every ratio is 1, that gradient is known
beforehand. With old logprobs, the server's `ppo` and `cispo` compute it themselves. Else a forward pass comes first.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tinker import types

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import Loss, LossTokens, StepLoss
from palestra.core.config import RunConfig
from palestra.core.errors import (
    NotFiniteError,
    PalestraError,
    RolloutError,
    SettingError,
    UnreadableFileError,
    UnsupportedError,
)
from palestra.core.files import write_json
from palestra.core.time_limit import outside_event_loop
from palestra.core.types import Array, Finish, SamplingParams, Turn
from palestra.core.weights import Weights, saved_tensors
from palestra.extras.tinker.client.model import ModelChange, Sampler, TinkerModel
from palestra.learner.base import noop
from palestra.policy.base import BoundedSessions

CHECKPOINT = "tinker.json"
_ADAM_EPS = 1e-8  # as the local optimizer
_NO_NORM = "the gradient norm is"  # how `palestra tinker` begins to say that it is not finite
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LossName = Literal["cross_entropy", "ppo", "cispo"]


@dataclass(frozen=True, slots=True)
class TinkerWeights(Weights):
    """Weights that stay on the server; reading their tensors downloads them."""

    sampler: Sampler | None = None


@dataclass
class TinkerOutputs:
    """The answers of one forward_backward; asking for them waits."""

    batch: Batch
    loss: StepLoss
    answer: Callable[[ModelChange], Any]
    sent: list[int]  # which rows
    changes: list[ModelChange]  # the first has the logprobs of all

    def logprobs(self) -> Array:
        return self._logprobs

    @cached_property
    def _logprobs(self) -> Array:
        answers = [self.answer(change) for change in self.changes]
        rows = _logprobs_of(answers[0]) if answers else []
        return as_column(rows, self.batch, self.sent, self.loss.echo_tokens > 0)

    def entropies(self) -> Array:
        """The service does not report them."""
        return np.full(len(self.batch.token_ids), np.nan, dtype=np.float32)

    @cached_property
    def terms(self) -> StepTerms:
        return step_terms(self.batch, self.loss, self.logprobs())

    def metrics(self) -> dict[str, float]:
        return self.terms.metrics | {"tokens_computed": float(self.batch.lengths[self.sent].sum())}


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

    def forward(self, batch: Batch, *, reference: bool = False) -> Array:
        rows, answers = trained_rows(batch, echo=False), list[Sequence[Any]]()
        if reference:
            answers = self._reference_logprobs(batch, rows)
        elif rows:
            data = datums(batch, rows, {"weights": np.zeros(len(batch.token_ids))})
            answers = _logprobs_of(self.model.call(lambda client: client.forward(data, "cross_entropy")))
        return as_column(answers, batch, rows, echo=False)

    def _reference_logprobs(self, batch: Batch, rows: Sequence[int]) -> list[Sequence[Any]]:
        """Under the base model, by its sampler: the adapter of the beginning changes nothing."""
        if not self._train.beta:
            raise SettingError("train.beta > 0 but the learner was built without it; set it at the start")
        ids, base = batch.split(batch.token_ids), self.model.reference(self._base_model)

        async def score(row: int) -> Sequence[Any]:
            prompt = types.ModelInput.from_ints(ids[row].tolist())
            found: list[Any] = await self.model.call_async(lambda: base.client.compute_logprobs(prompt))
            return found[1:]

        async def score_all() -> list[Sequence[Any]]:
            return list(await asyncio.gather(*map(score, rows)))

        return outside_event_loop(lambda: asyncio.run(score_all()))

    def forward_backward(self, batch: Batch, loss: Loss) -> TinkerOutputs:
        assert isinstance(loss, StepLoss)
        if loss.entropy_coefficient:
            raise UnsupportedError(
                f"entropy_coefficient = {loss.entropy_coefficient}: a Tinker server gives the logprobs of tokens, not "
                "the entropy of their distributions; set train.entropy_coefficient to 0"
            )
        sent = trained_rows(batch, loss.echo_tokens > 0)
        try:
            passes = list(self._passes(batch, loss)) if sent else []
            changes = [self._send(batch, sent, *each) for each in passes]
        except BaseException:  # no gradient is left behind, nor what had gathered before
            gradients, self._pending = [change for outputs in self._pending for change in outputs.changes], []
            if gradients:
                self.model.undo(gradients)
            raise
        self._pending.append(TinkerOutputs(batch, loss, self.model.answer, sent, changes))
        return self._pending[-1]

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Callable[[], None] = noop) -> float:
        pending, self._pending = [outputs for outputs in self._pending if outputs.changes], []
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
        gradients = [change for outputs in pending for change in outputs.changes]
        step = self.model.change(lambda client: client.optim_step(adam), is_step=True)
        try:
            host_work()
            parts = [part for outputs in pending for part in (outputs.terms.row_losses, outputs.terms.gradient)]
            wrong = "" if all(np.isfinite(part).all() for part in parts) else "the loss is nan"
            norm = math.nan if wrong else self._norm(step)
            if wrong or math.isinf(norm):
                rows = [(o.batch.groups.tolist(), o.terms.row_losses.tolist()) for o in pending]
                losses = (pair for groups, values in rows for pair in zip(groups, values, strict=True))
                raise _not_finite(losses, wrong or "the gradient norm is inf or nan")
        except PalestraError:
            self.model.undo([*gradients, step])
            raise
        return norm

    def _norm(self, step: ModelChange) -> float:
        """Of the gradient before clipping; infinite where the server says that it is not finite."""
        try:
            return gradient_norm(self.model.answer(step).metrics or {})
        except PalestraError as error:
            if _NO_NORM not in str(error):
                raise
            return math.inf

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
        try:
            state = str(json.loads((folder / CHECKPOINT).read_text(encoding="utf-8"))["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnreadableFileError(
                f"{folder} has no state of a Tinker server ({CHECKPOINT}: {error}); another backend trained the run"
            ) from None
        self.model.load(state)

    def export(self, folder: Path) -> Path:
        return self.model.download(folder)

    def _read_tensors(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return saved_tensors(self.export(Path(folder)))

    def _passes(self, batch: Batch, loss: StepLoss) -> Iterator[tuple[LossName, dict[str, float], Mapping[str, Array]]]:
        """Passes to send: one of the server's own loss and one for ECHO, or one with the whole gradient."""
        objective, logprobs = loss.objective, np.zeros(len(batch.token_ids), dtype=np.float32)
        native = server_loss(objective, batch)
        if native is not None:
            assert batch.old_logprobs is not None
            tokens, at = scored_tokens(batch, echo=False)
            advantages = np.zeros(len(batch.token_ids))  # times the weight of each policy token in the loss
            advantages[at] = batch.advantages[at] * loss.token_weights(tokens).numpy()
            inputs = {"advantages": _require_finite(advantages, batch), "logprobs": np.nan_to_num(batch.old_logprobs)}
            yield *native, inputs
            if not loss.echo_tokens:
                return
        else:
            knows_old = batch.old_logprobs is not None and np.isfinite(batch.old_logprobs[batch.policy_mask]).any()
            corrects = objective.importance_correction != "none" or objective.off_policy_mask_threshold is not None
            if knows_old or corrects or objective.beta > 0 or objective.custom is not None:
                logprobs = self.forward(batch)
            # else every ratio is 1, and the gradient the same whatever they are
        gradient = step_terms(batch, loss, logprobs).gradient
        if native is not None:  # that of ECHO does not depend on logprobs
            gradient *= batch.echo_mask
        yield "cross_entropy", {}, {"weights": -_require_finite(gradient, batch)}

    def _send(
        self, batch: Batch, rows: list[int], name: LossName, config: Mapping[str, float], inputs: Mapping[str, Array]
    ) -> ModelChange:
        data = datums(batch, rows, inputs)
        return self.model.change(lambda client: client.forward_backward(data, name, dict(config) or None))


def _read_tokens(batch: Batch, echo: bool) -> Array:
    """[T] which tokens some loss reads."""
    return batch.policy_mask | batch.echo_mask if echo else batch.policy_mask


def trained_rows(batch: Batch, echo: bool) -> list[int]:
    """The rows that some loss reads."""
    return np.flatnonzero(batch.count(batch.predicted(_read_tokens(batch, echo)))).tolist()


def datums(batch: Batch, rows: Sequence[int], inputs: Mapping[str, Array]) -> list[types.Datum]:
    """Token i predicts token i + 1, so that every input is shifted by one."""
    ids = batch.split(batch.token_ids)
    columns = {name: batch.split(column) for name, column in inputs.items()}
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[i][:-1].tolist()),
            loss_fn_inputs={"target_tokens": ids[i][1:].astype(np.int64)}
            | {name: values[i][1:].astype(np.float32) for name, values in columns.items()},
        )
        for i in rows
    ]


def _logprobs_of(answer: Any) -> list[Sequence[Any]]:
    return [output["logprobs"].data for output in answer.loss_fn_outputs]


def as_column(answers: Sequence[Sequence[Any]], batch: Batch, rows: Sequence[int], echo: bool) -> Array:
    """[T] the logprobs of these rows, without their first tokens; NaN at tokens that no loss reads."""
    column = np.full(len(batch.token_ids), np.nan, dtype=np.float32)
    values = batch.split(column)
    for i, logprobs in zip(rows, answers, strict=True):
        values[i][1:] = np.asarray(logprobs, dtype=np.float32)
    column[~_read_tokens(batch, echo)] = np.nan
    return column


def gradient_norm(metrics: Mapping[str, float]) -> float:
    """The gradient's norm before clipping, by its name on the server; NaN where it is not reported."""
    names = [name for name in metrics if "grad" in name and ("norm" in name or "l2" in name)]
    return float(metrics[min(names, key=len)]) if names else math.nan


def _require_finite(column: Array, batch: Batch) -> Array:
    bad = np.flatnonzero(~np.isfinite(column))
    if len(bad):
        groups = batch.groups[batch.row_of(bad)].tolist()
        raise _not_finite(zip(groups, column[bad].tolist(), strict=True), "the loss is nan")
    return column


def _not_finite(losses: Iterable[tuple[int, float]], what: str) -> PalestraError:
    """Names the groups whose loss is not finite, or the one with the largest loss."""
    each = list(losses)
    groups = {group for group, loss in each if not math.isfinite(loss)} or {max(each, key=lambda x: abs(x[1]))[0]}
    return NotFiniteError(
        f"group {', '.join(map(str, sorted(groups)))}: {what}, expected a finite number; the weights are unchanged. "
        "Lower train.learning_rate"
    )


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A batch's share of the loss under given logprobs, and its gradient."""

    metrics: dict[str, float]
    gradient: Array  # [T] ∂loss/∂logprob
    row_losses: Array  # [R] float64


def server_loss(objective: Objective, batch: Batch) -> tuple[LossName, dict[str, float]] | None:
    """The server's own loss and its clipping for an objective, where it has one and every old logprob is known."""
    other_terms = objective.beta or objective.importance_correction != "none" or objective.sequence_ratio
    others = (objective.custom, objective.off_policy_mask_threshold, objective.delta)
    old = batch.old_logprobs
    if other_terms or any(option is not None for option in others) or old is None:
        return None
    if not np.isfinite(old[batch.predicted(batch.policy_mask)]).all():
        return None
    names: dict[str, tuple[LossName, float]] = dict.fromkeys(CLIPPED_LOSSES, ("ppo", 1.0 - objective.epsilon))
    if (found := (names | {"cispo": ("cispo", 0.0)}).get(objective.loss)) is None:
        return None
    return found[0], {"clip_low_threshold": found[1], "clip_high_threshold": objective.upper}


def scored_tokens(batch: Batch, *, echo: bool) -> tuple[LossTokens, Array]:
    """All scored tokens of a batch on the host, in float64, and [N] their places in its columns."""
    policy = batch.predicted(batch.policy_mask)
    observed = batch.predicted(batch.echo_mask) if echo else np.zeros_like(policy)
    at = np.flatnonzero(policy | observed)
    columns = {name: getattr(batch, name) for name in ("logprobs", "advantages", "old_logprobs", "ref_logprobs")}
    tokens = LossTokens(
        rows=batch.rows,
        row=torch.from_numpy(batch.row_of(at)),
        inputs={n: torch.from_numpy(x[at].astype(np.float64)) for n, x in columns.items() if x is not None},
        policy=torch.from_numpy(np.flatnonzero(policy[at])),
        echo=torch.from_numpy(np.flatnonzero(observed[at])),
        policy_lengths=torch.from_numpy(batch.count(policy)),
        echo_lengths=torch.from_numpy(batch.count(observed)),
    )
    return tokens, at


def step_terms(batch: Batch, loss: StepLoss, logprobs: Array) -> StepTerms:
    """The loss of a batch whose tokens have these logprobs [T]."""
    tokens, at = scored_tokens(batch, echo=loss.echo_tokens > 0)
    own = torch.from_numpy(np.nan_to_num(logprobs[at].astype(np.float64), nan=0.0)).requires_grad_()
    result = loss(tokens, own, None)
    total = (result.terms * torch.tensor(loss.weights, dtype=torch.float64)).sum()
    gradient = np.zeros(len(batch.token_ids))
    if total.requires_grad:
        [by_own] = torch.autograd.grad(total, [own], materialize_grads=True)
        gradient[at] = by_own.numpy()
    assert tokens.policy is not None
    losses = (result.token_losses * loss.token_weights(tokens.select(tokens.policy))).numpy()
    row_losses = np.bincount(result.row.numpy(), losses, minlength=batch.rows)
    return StepTerms(loss.metrics(result.terms.detach(), result.stats), gradient, row_losses)


class TinkerPolicy(BoundedSessions):
    """Samples one version of the model's weights until it is given the next: turns in progress stay at theirs."""

    def __init__(self, model: TinkerModel, context_tokens: int) -> None:
        self.context_tokens = self._context = context_tokens
        self._model = model
        self._sampler: Sampler = model.sampler(0)
        self.version = 0

    def update(self, weights: Weights) -> None:
        if not isinstance(weights, TinkerWeights) or weights.sampler is None:
            raise UnsupportedError("a Tinker server samples the weights it has trained; train with --backend tinker")
        self._sampler, self.version = weights.sampler, weights.sampler.version

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        prompt, options, sampler = types.ModelInput.from_ints(ids), sampling_params(params), self._sampler
        try:
            answer = await self._model.call_async(lambda: sampler.client.sample(prompt, 1, options))
        except PalestraError as error:
            raise RolloutError(str(error)) from error
        sequence = answer.sequences[0]
        logprobs = sequence.logprobs
        if logprobs is None or len(logprobs) != len(sequence.tokens) or not sequence.tokens:
            count = None if logprobs is None else len(logprobs)
            raise RolloutError(f"the Tinker server sampled {len(sequence.tokens)} tokens with {count} logprobs")
        finish: Finish = "stop" if sequence.stop_reason == "stop" else "length"
        return Turn("model", np.array(sequence.tokens), np.array(logprobs), sampler.version, finish)  # type: ignore[arg-type]


def sampling_params(params: SamplingParams) -> types.SamplingParams:
    """As the SDK has them; what it does not have is refused."""
    missing = {
        "min_p": params.min_p != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "grammar": params.grammar is not None,
        "stop strings beside stop tokens": bool(params.stop and params.stop_token_ids),
    }
    if refused := [name for name, used in missing.items() if used]:
        raise UnsupportedError(f"a Tinker server cannot sample with {', '.join(refused)}; leave it out")
    stops: list[str] | list[int] = list(params.stop) if params.stop else list(params.stop_token_ids)
    return types.SamplingParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        seed=params.seed,
        stop=stops,  # none at all: also not at the end of the text
    )
