"""The learner on this machine: any Hugging Face causal language model, whole or with adapters."""

from __future__ import annotations

import copy
import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from palestra.algo.batching import MicroBatch, pack, split_minibatches
from palestra.algo.echo import coefficient_at, world_model_loss
from palestra.algo.entropy import entropy_bonus, next_entropy_coefficient
from palestra.algo.losses import Objective, TokenStats, policy_loss, token_weights
from palestra.core.config import RunConfig, TrainSection
from palestra.core.errors import PalestraError
from palestra.core.types import Sample
from palestra.train import learner_state
from palestra.train.forward import Scorer, causal_lm
from palestra.train.optimizer import Optimizer, learning_rate_at

# These reductions divide by the tokens of the whole batch of rollouts, however many steps it is split into.
BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")


@dataclass(slots=True)
class _Work:
    """One micro-batch of a step, with what is computed once for all passes over it."""

    batch: MicroBatch
    old: Tensor | None = None  # [N] behaviour log-probabilities; None: exactly on-policy
    reference: Tensor | None = None  # [N]


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """The samples of one optimizer step and the normalisers of its loss."""

    samples: list[Sample]
    works: list[_Work]
    advantages: Tensor  # [R]
    trained_lengths: Tensor  # [R]
    observed_lengths: Tensor  # [R]
    tokens_total: float
    trained_tokens: int
    observed_tokens: int
    observed_rows: int
    longest_row: int


class LocalLearner:
    """Trains one model in place; the sampler that drives the same model sees every step at once.

    `total_steps` is the number of `step` calls of the whole run, for schedules that end. The model's
    weights at construction are the KL reference, if `train.beta` asks for one.

    >>> learner = LocalLearner(model, config=config)  # doctest: +SKIP
    >>> metrics = learner.step(samples, config.train)
    >>> version = learner.publish()
    """

    def __init__(
        self, model: nn.Module, *, config: RunConfig, pad_token_id: int = 0, total_steps: int | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps if total_steps is not None else config.train.max_steps
        self.version = 0
        self.steps = 0
        self.entropy_coefficient = config.train.entropy_coefficient
        self._peft = hasattr(model, "disable_adapter")
        if config.lora.r > 0 and not self._peft:
            raise PalestraError(
                "lora.r > 0 but the model has no adapter; wrap it with palestra.train.lora.add_lora first"
            )
        if config.model.gradient_checkpointing:
            _checkpoint_layers(model)
        self._scorer = Scorer(model, temperature=config.rollout.temperature, pad_token_id=pad_token_id)
        self._reference: Scorer | None = None
        if config.train.beta > 0:
            frozen = model if self._peft else copy.deepcopy(model).requires_grad_(False).eval()
            self._reference = Scorer(frozen, temperature=config.rollout.temperature, pad_token_id=pad_token_id)
        self._optimizer = Optimizer(model, config.train, master_weights=config.model.master_weights)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step(self, samples: Sequence[Sample], objective: TrainSection) -> dict[str, float]:
        """Learn from one batch of rollouts: `iterations` passes of `minibatches` optimizer steps each.

        A NaN or an infinity in the loss or the gradient raises PalestraError before the weights change.
        """
        started = time.perf_counter()
        self._check(samples)
        learning_rate = learning_rate_at(self.steps, objective, self.total_steps)
        with self._session():
            parts = self._prepare(samples, objective)
            self._fill_old_and_reference(parts, objective)
            updates = [
                self._update(part, objective, learning_rate, record_old=objective.iterations > 1)
                for _ in range(objective.iterations)
                for part in parts
            ]
        self.steps += 1
        metrics = _average(updates)
        if objective.target_entropy is not None and "entropy" in metrics:
            metrics["entropy_coefficient"] = self.entropy_coefficient
            self.entropy_coefficient = next_entropy_coefficient(
                self.entropy_coefficient, metrics["entropy"], objective.target_entropy
            )
        seconds = time.perf_counter() - started
        fed = sum(len(work.batch.token_ids) for part in parts for work in part.works)
        return metrics | {
            "learning_rate": learning_rate,
            "tokens_trained": float(sum(part.trained_tokens for part in parts)),
            "tokens_computed": float(fed),
            "train_tokens_per_s": fed * objective.iterations / seconds,
            "train_seconds": seconds,
            "peak_memory_gib": self._peak_memory_gib(),
        }

    def publish(self) -> int:
        """The sampler drives this very model, so publishing is counting."""
        self.version += 1
        return self.version

    def save(self, folder: Path) -> None:
        """Write weights (or the adapter) and everything needed to go on exactly into an existing folder."""
        state = {
            "version": self.version,
            "steps": self.steps,
            "entropy_coefficient": self.entropy_coefficient,
            "optimizer": self._optimizer.state_dict(),
        }
        learner_state.save(folder, self.model, state)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, with the same numbers as if nothing had happened."""
        state = learner_state.load(folder, self.model)
        self._optimizer.load_state_dict(state["optimizer"])
        self.version, self.steps = state["version"], state["steps"]
        self.entropy_coefficient = state["entropy_coefficient"]

    def _check(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise PalestraError(f"step {self.steps} got no samples; give the learner at least one group")
        for sample in samples:
            if not math.isfinite(sample.advantage):
                raise PalestraError(
                    f"step {self.steps}, group {sample.group}: the advantage is {sample.advantage}, expected a finite "
                    "number; look for a measure that returns NaN"
                )

    @contextmanager
    def _session(self) -> Iterator[None]:
        training = self.model.training
        self.model.train()
        try:
            with self._scorer.session():
                yield
        finally:
            self.model.train(training)

    def _prepare(self, samples: Sequence[Sample], objective: TrainSection) -> list[_Minibatch]:
        echo = self.config.echo.coefficient > 0
        chunks = split_minibatches(samples, objective.minibatches)
        share = objective.share_prefix and self._scorer.shares_prefix
        packed = [
            pack(c, max_tokens=objective.tokens_per_micro_batch, share_prefix=share, observed=echo) for c in chunks
        ]
        return _with_normalisers(chunks, packed, objective, self.device)

    @torch.no_grad()
    def _fill_old_and_reference(self, parts: list[_Minibatch], objective: TrainSection) -> None:
        """Behaviour and reference log-probabilities that the first update would change, or that need no gradient."""
        stale = any(sample.policy_version != self.version for part in parts for sample in part.samples)
        self.model.eval()
        for part in parts:
            for work in part.works:
                if stale:
                    work.old = work.batch.sampler_logprobs
                elif len(parts) > 1:
                    work.old = self._scorer(work.batch)[0]
                if objective.beta > 0:
                    work.reference = self._reference_logprobs(work.batch)
        self.model.train()

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        if self._reference is None:
            raise PalestraError(
                "train.beta > 0 but the learner was built without it; set it in the config from the start"
            )
        if self._peft:
            with self.model.disable_adapter():
                return self._reference(batch)[0]
        with self._reference.session():
            return self._reference(batch)[0]

    def _update(
        self, part: _Minibatch, objective: TrainSection, learning_rate: float, *, record_old: bool
    ) -> dict[str, float]:
        """One optimizer step; nothing is applied unless loss and gradient are finite."""
        formula = _formula(objective)
        stats = TokenStats()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # policy, echo, entropy bonus
        token_losses: list[tuple[Tensor, Tensor]] = []
        for work in part.works:
            terms, token_loss, work_stats = self._terms(work, part, formula, objective, record_old)
            torch.stack(terms).sum().backward()
            sums += torch.stack([term.detach().double() for term in terms])
            token_losses.append((token_loss, work.batch.row[work.batch.trained]))
            stats += work_stats
        norm = self._optimizer.clip(objective.max_grad_norm) if part.works else sums.new_zeros(())
        *values, grad_norm = torch.cat([sums, norm.double()[None]]).tolist()
        if not all(math.isfinite(x) for x in (*values, grad_norm)):
            self._optimizer.clear()
            raise PalestraError(self._explain_not_finite(part, token_losses, values, grad_norm))
        if part.works:
            self._optimizer.step(learning_rate)
        policy, echo, bonus = values
        losses = {"loss": policy + echo + bonus, "policy_loss": policy, "grad_norm": grad_norm}
        if part.observed_tokens:
            losses["echo_loss"] = echo / max(self._echo_coefficient(), 1e-30)
        return losses | stats.finish()

    def _terms(
        self, work: _Work, part: _Minibatch, formula: Objective, objective: TrainSection, record_old: bool
    ) -> tuple[list[Tensor], Tensor, TokenStats]:
        """This micro-batch's share of the policy loss, the ECHO term and the entropy bonus."""
        batch = work.batch
        steer = self.entropy_coefficient != 0.0
        logprobs, entropy = self._scorer(batch, entropy_gradient=steer)
        if record_old and work.old is None:
            work.old = logprobs.detach()
        trained = batch.trained.nonzero().squeeze(-1)
        row = batch.row[trained]
        token_loss, stats = policy_loss(
            formula,
            logprobs[trained],
            None if work.old is None else work.old[trained],
            row,
            part.advantages,
            sampler_logprobs=batch.sampler_logprobs[trained],
            ref_logprobs=None if work.reference is None else work.reference[trained],
            entropy=entropy[trained],
        )
        weights = token_weights(
            formula.loss,
            row,
            part.trained_lengths,
            rows_total=len(part.samples),
            tokens_total=part.tokens_total,
            max_completion_length=self.config.rollout.max_new_tokens,
        )
        zero = logprobs.sum() * 0.0
        terms = [(token_loss * weights.to(token_loss.dtype)).sum(), zero, zero]
        if part.observed_tokens:
            observed = batch.observed.nonzero().squeeze(-1)
            terms[1] = self._echo_coefficient() * world_model_loss(
                logprobs[observed],
                batch.row[observed],
                part.observed_lengths,
                normalization=self.config.echo.normalization,
                tokens_total=part.observed_tokens,
                rows_total=part.observed_rows,
                max_sequence_length=part.longest_row,
            )
        if steer:
            terms[2] = entropy_bonus(entropy[trained], self.entropy_coefficient, tokens_total=part.trained_tokens)
        return terms, token_loss.detach(), stats

    def _echo_coefficient(self) -> float:
        echo = self.config.echo
        return coefficient_at(
            self.steps,
            schedule=echo.schedule,
            initial=echo.coefficient,
            final=echo.final_coefficient,
            steps_total=self.total_steps,
            step_every=echo.step_every,
        )

    def _explain_not_finite(
        self, part: _Minibatch, token_losses: list[tuple[Tensor, Tensor]], values: list[float], grad_norm: float
    ) -> str:
        bad = {
            part.samples[int(r)].group
            for loss, row in token_losses
            for r in row[~torch.isfinite(loss)].unique().tolist()
        }
        groups = sorted(bad or {sample.group for sample in part.samples})
        what = (
            f"the loss is {sum(values)}"
            if bad or not math.isfinite(sum(values))
            else f"the gradient norm is {grad_norm}"
        )
        return (
            f"step {self.steps}, group {', '.join(map(str, groups))}: {what}, expected a finite number; the weights are "
            "unchanged. Lower train.learning_rate, or train in float32 or bfloat16 instead of float16"
        )

    def _peak_memory_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _with_normalisers(
    chunks: list[list[Sample]], packed: list[list[MicroBatch]], objective: TrainSection, device: torch.device
) -> list[_Minibatch]:
    def count(batches: list[MicroBatch], rows: int, name: str) -> Tensor:
        total = torch.zeros(rows, dtype=torch.int64)
        for batch in batches:
            total += torch.bincount(batch.row[getattr(batch, name)], minlength=rows)
        return total

    parts = []
    trained = [count(b, len(c), "trained") for c, b in zip(chunks, packed, strict=True)]
    batch_tokens = sum(int(t.sum()) for t in trained)
    for chunk, batches, lengths in zip(chunks, packed, trained, strict=True):
        observed = count(batches, len(chunk), "observed")
        own = int(lengths.sum())
        parts.append(
            _Minibatch(
                samples=chunk,
                works=[_Work(batch.to(device)) for batch in batches],
                advantages=torch.tensor([s.advantage for s in chunk], dtype=torch.float32).to(device),
                trained_lengths=lengths.to(device),
                observed_lengths=observed.to(device),
                tokens_total=batch_tokens / len(chunks) if objective.loss in BATCH_TOKEN_LOSSES else own,
                trained_tokens=own,
                observed_tokens=int(observed.sum()),
                observed_rows=int((observed > 0).sum()),
                longest_row=max(len(s.token_ids) for s in chunk),
            )
        )
    return parts


def _formula(objective: TrainSection) -> Objective:
    return Objective(**{f.name: getattr(objective, f.name) for f in fields(Objective)})


def _average(updates: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps that report it; maxima stay maxima."""
    names = {name: None for update in updates for name in update}
    values = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: max(x) if name.endswith("_max") else sum(x) / len(x) for name, x in values.items()}


def _checkpoint_layers(model: nn.Module) -> None:
    """Recompute each layer's activations in the backward pass."""
    hf = causal_lm(model)
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
