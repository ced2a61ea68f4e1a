"""The learner on this machine: any Hugging Face causal language model, whole or with adapters."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from palestra.algo.batching import MicroBatch
from palestra.algo.echo import coefficient_at, world_model_loss
from palestra.algo.entropy import entropy_bonus, next_entropy_coefficient
from palestra.algo.losses import Objective, TokenStats, policy_loss, token_weights
from palestra.core.config import RunConfig, TrainSection
from palestra.core.errors import PalestraError
from palestra.core.types import Sample
from palestra.learner import state as learner_state
from palestra.learner.forward import Scorer, causal_lm
from palestra.learner.memory import peak_memory_gib
from palestra.learner.minibatch import Minibatch, Work, make_minibatches
from palestra.learner.optimizer import Optimizer, learning_rate_at


class LocalLearner:
    """Trains one model in place; the sampler that drives the same model sees every step at once.

    `total_steps` is the number of `step` and `skip` calls of the whole run, for schedules that end. The model's
    weights at construction are the KL reference, if `train.beta` asks for one.

    >>> learner = LocalLearner(model, config=config)  # doctest: +SKIP
    >>> metrics = learner.step(samples, config.train)
    >>> version = learner.publish()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: RunConfig,
        pad_token_id: int = 0,
        total_steps: int | None = None,
        optimizer: Optimizer | None = None,
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
                "lora.r > 0 but the model has no adapter; wrap it with palestra.learner.lora.add_lora first"
            )
        if config.model.gradient_checkpointing:
            _checkpoint_layers(model)
        self._scorer = Scorer(model, temperature=config.rollout.temperature, pad_token_id=pad_token_id)
        self._reference: Scorer | None = None
        if config.train.beta > 0 and self._peft:
            self._reference = self._scorer  # the same weights, with the adapter switched off
        elif config.train.beta > 0:
            frozen = copy.deepcopy(model).requires_grad_(False).eval()
            self._reference = Scorer(frozen, temperature=config.rollout.temperature, pad_token_id=pad_token_id)
        self._optimizer = optimizer or Optimizer(model, config.train, master_weights=config.model.master_weights)

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
            parts = make_minibatches(
                samples,
                objective,
                share_prefix=objective.share_prefix and self._scorer.shares_prefix,
                observed=self.config.echo.coefficient > 0,
                device=self.device,
            )
            self._scorer.prepare([work.batch for part in parts for work in part.works])
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

    def skip(self) -> None:
        self.steps += 1

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
        if not training:  # telling every module costs milliseconds
            self.model.train()
        try:
            with self._scorer.session():
                yield
        finally:
            if not training:
                self.model.eval()

    @torch.no_grad()
    def _fill_old_and_reference(self, parts: list[Minibatch], objective: TrainSection) -> None:
        """Behaviour and reference log-probabilities that the first update would change, or that need no gradient."""
        stale = any(sample.policy_version != self.version for part in parts for sample in part.samples)
        if not (stale or len(parts) > 1 or objective.beta > 0):
            return
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
            with self.model.disable_adapter():  # type: ignore[operator]
                return self._reference(batch)[0]
        with self._reference.session():
            return self._reference(batch)[0]

    def _update(
        self, part: Minibatch, objective: TrainSection, learning_rate: float, *, record_old: bool
    ) -> dict[str, float]:
        """One optimizer step; nothing is applied unless loss and gradient are finite."""
        stats = TokenStats()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # policy, echo, entropy bonus
        echo_weight = torch.tensor([1.0, self._echo_coefficient(), 1.0], device=self.device)
        token_losses: list[tuple[Tensor, Tensor]] = []
        for work in part.works:
            terms, token_loss, work_stats = self._terms(work, part, objective, record_old)
            (terms * echo_weight).sum().backward()
            sums += terms.detach()
            token_losses.append((token_loss, work.batch.row[work.trained]))
            stats += work_stats
        norm = self._optimizer.clip(objective.max_grad_norm) if part.works else sums.new_zeros(())
        checks = torch.cat([sums, norm.double()[None]])
        ahead = self._optimizer.can_skip  # then it is launched before the host waits for the numbers
        if part.works and ahead:
            self._optimizer.step(learning_rate, finite=checks.isfinite().all())
        *values, grad_norm = checks.tolist()
        if not all(math.isfinite(x) for x in (*values, grad_norm)):
            self._optimizer.clear()
            raise PalestraError(self._explain_not_finite(part, token_losses, values, grad_norm))
        if part.works and not ahead:
            self._optimizer.step(learning_rate)
        policy, echo, bonus = values
        loss = policy + self._echo_coefficient() * echo + bonus
        losses = {"loss": loss, "policy_loss": policy, "grad_norm": grad_norm}
        if part.observed_tokens:
            losses["echo_loss"] = echo
        return losses | stats.finish()

    def _terms(
        self, work: Work, part: Minibatch, objective: TrainSection, record_old: bool
    ) -> tuple[Tensor, Tensor, TokenStats]:
        """This micro-batch's share of [policy loss, cross-entropy on tool results, entropy bonus], its token losses."""
        batch, trained = work.batch, work.trained
        steer = self.entropy_coefficient != 0.0
        logprobs, entropy = self._scorer(batch, entropy_gradient=steer)
        if record_old and work.old is None:
            work.old = logprobs.detach()
        row = batch.row[trained]
        formula = _formula(objective)
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
        policy = (token_loss * weights.to(token_loss.dtype)).sum()
        echo = bonus = torch.zeros_like(policy)
        if part.observed_tokens:
            echo = world_model_loss(
                logprobs[work.observed],
                batch.row[work.observed],
                part.observed_lengths,
                normalization=self.config.echo.normalization,
                tokens_total=part.observed_tokens,
                rows_total=part.observed_rows,
                max_sequence_length=part.longest_row,
            )
        if steer:
            bonus = entropy_bonus(entropy[trained], self.entropy_coefficient, tokens_total=part.trained_tokens)
        return torch.stack([policy, echo, bonus]), token_loss.detach(), stats

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
        self, part: Minibatch, token_losses: list[tuple[Tensor, Tensor]], values: list[float], grad_norm: float
    ) -> str:
        rows = {int(r) for loss, row in token_losses for r in row[~torch.isfinite(loss)].tolist()}
        groups = sorted({part.samples[r].group for r in rows} or {sample.group for sample in part.samples})
        loss = sum(values)
        what = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
        return (
            f"step {self.steps}, group {', '.join(map(str, groups))}: {what}, expected a finite number; "
            "the weights are unchanged. Lower train.learning_rate, or use float32 or bfloat16 instead of float16"
        )

    def _peak_memory_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return peak_memory_gib()


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
