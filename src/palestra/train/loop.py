"""THE loop: groups -> advantages -> samples -> one update -> new weights -> again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from palestra.core.calls import hung_calls
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, text_of
from palestra.core.files import free_bytes
from palestra.core.phases import phases
from palestra.core.ranks import ONE_PROCESS, Ranks
from palestra.evals.findings import run_findings
from palestra.learner.base import Learner, nothing
from palestra.learner.memory import peak_memory_gib
from palestra.policy.base import Policy
from palestra.tracking.base import Tracker
from palestra.train.checkpoint import (
    TrainState,
    join_checkpoint,
    last_checkpoint,
    prune,
    save_checkpoint,
    step_folder,
)
from palestra.train.group_source import GroupSource, PreparesSteps, StepRollouts, gather
from palestra.train.interrupt import deferred_interrupts
from palestra.train.metrics import rollout_metrics
from palestra.train.samples import group_advantages, trainable_samples
from palestra.train.schedule import coefficients_at, next_entropy
from palestra.train.token_record import TokenRecord
from palestra.train.update import update
from palestra.train.watcher import Watcher

log = logging.getLogger("palestra")
NEVER_BEST = float("-inf")
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; a checkpoint of the last whole step is on disk."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"interrupted; saved {checkpoint}. Go on with resume={str(checkpoint.parent.parent)!r}")
        self.checkpoint = checkpoint


@dataclass(slots=True)
class Training:
    """A run in progress: its parts, and how far it has come."""

    config: RunConfig
    source: GroupSource
    policy: Policy[Any]
    learner: Learner
    tracker: Tracker
    total_steps: int | None  # None where steps are taken one by one
    checkpoints: Path | None = None  # None: none are written
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    watcher: Watcher = field(default_factory=Watcher)
    state: TrainState = field(default_factory=TrainState)
    write_beside: Callable[[Path], None] = lambda folder: None  # makes a checkpoint's weights a model: tokenizer, …
    learner_thread: Executor | None = None  # the learner works there while the event loop samples; None: nobody samples
    ranks: Ranks = ONE_PROCESS  # all of which go through this loop together
    earlier_s: float = 0.0  # how long the run took before it was resumed
    began: float = field(default_factory=time.perf_counter)
    history: list[dict[str, float]] = field(default_factory=list)  # the metrics of the steps that `run` has taken
    reported_findings: set[str] = field(default_factory=set)  # the kinds that the watcher was warned of
    ended_early: str | None = None  # why it did not go on to the last step
    checkpoint_bytes: int = 0  # a checkpoint is skipped where the disk has no room for it and for the final model
    model_bytes: int = 0
    save_model: Callable[[], object] = lambda: None  # called after the last step, before its checkpoint

    def run(self, evaluate: Callable[[int], float] | None = None, lacks_evaluation: bool = False) -> None:
        """Train to the last step, with checkpoints; Ctrl-C raises `Interrupted` after saving one.

        `evaluate` is called with the step at every `eval.every` and gives the held-out reward; also at once, where
        the run was killed before its last evaluation had ended.
        """
        total = self.total_steps or 0
        try:
            if evaluate and lacks_evaluation:
                self._save_if_best(evaluate(self.state.step))
            self.watcher.phase("training", total)
            while self.state.step < total and self.ended_early is None:
                metrics = self.step()
                self.watcher.advance(self.state.step, metrics)
                self._judge(metrics, total)
                self._log(metrics, total)
                if self.state.step >= total or self.ended_early is not None:
                    self.save_model()
                by_evaluation = evaluate is not None and self.config.eval.every > 0
                self._save_if_due(NEVER_BEST if by_evaluation else metrics.get("reward_mean", NEVER_BEST))
                if evaluate and self.evaluates_after(self.state.step):
                    self._save_if_best(evaluate(self.state.step))
                    self.watcher.phase("training", total)
            self.tracker.flush()
        except KeyboardInterrupt:
            if self.checkpoints is None:
                raise
            with deferred_interrupts():
                raise Interrupted(self.checkpoint()) from None
        except Exception as error:
            raise self.failure(f"step {self.state.step + 1}", error) from error
        last = last_checkpoint(self.checkpoints) if self.checkpoints else None
        if self.checkpoints and self.config.checkpoint.every and last != step_folder(self.checkpoints, self.state.step):
            try:
                if self._has_room():
                    self.checkpoint()
            except Exception as error:
                raise self.failure("saving the last checkpoint", error) from error

    @property
    def steps_left(self) -> int | None:
        """With the one in progress; None where steps are taken one by one."""
        return None if self.total_steps is None else self.total_steps - self.state.step

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due between this step and the next."""
        every = self.config.eval.every
        return bool(every) and step > 0 and step % every == 0 and step < (self.total_steps or 0)

    def _log(self, metrics: dict[str, float], total: int) -> None:
        """A log line every `track.log_every` steps, for runs without a display."""
        step = self.state.step
        if step % self.config.track.log_every == 0 or step == total:
            names = ("loss", "reward_mean", "pass_rate")
            shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
            log.info("step %d of %d: %s", step, total, shown)

    def _judge(self, metrics: dict[str, float], total: int) -> None:
        """Warn of what keeps the run from learning, each kind once, and end it where nothing is left to learn."""
        self.history.append(metrics)
        for finding in run_findings(self.history):
            if finding.kind not in self.reported_findings:
                self.reported_findings.add(finding.kind)
                self.watcher.warn(finding.sentence)
        count = self.config.train.stop_when_solved
        recent = self.history[-count:] if count else []
        if count and len(recent) == count and all(row.get("pass_rate") == 1.0 for row in recent):
            self.ended_early = (
                f"every rollout of the last {count} steps passed, so the training ended after step {self.state.step} "
                f"of {total} (train.stop_when_solved={count})"
            )
            self.watcher.note(self.ended_early)

    def step(self) -> dict[str, float]:
        """One step: sample and learn. The state moves on only when all of it has worked."""
        count = self.config.train.problems_per_step
        phases.take()
        state = self.state
        rollouts = self.runner.run(gather(self.source, count, self.config, state.policy_version, state.signal_rate))
        times = phases.take()
        times["agent_loop"] = max(0.0, rollouts.seconds - sum(times.values()))
        with deferred_interrupts():
            return self.learn(rollouts, times)

    def learn(self, rollouts: StepRollouts, times: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
        """Learn from the groups, publish the weights, record the step; `times` is where its sampling's went."""
        began, state, config = time.perf_counter(), self.state, self.config
        groups = rollouts.groups
        advantages = group_advantages(groups, config.train, self.source.reward_weights)
        coefficients = coefficients_at(state.step, config, self.total_steps, self.entropy_coefficient)
        samples = trainable_samples(groups, advantages, config.train, echo=coefficients.echo > 0)
        version = state.policy_version
        record = TokenRecord() if config.track.records_tokens(state.step + 1) else None
        metrics: dict[str, float] = {}
        learned: dict[str, float] = {}

        def beside() -> None:
            """What needs no weights is done while a GPU changes them."""
            if not metrics:
                self._prepare_next()
                metrics.update(self._rollout_metrics(rollouts, advantages))
                with phases("records"):
                    self.tracker.rollouts(state.step + 1, groups)

        if any(s.policy_mask.any() or s.echo_mask.any() for s in samples):
            with self._policy_asleep(), phases("learner"):
                meanwhile = beside if self.learner_thread is None else nothing
                learn = partial(update, self.learner, samples, config, coefficients, version, record, meanwhile)
                learned = self._compute(learn)
            if config.train.target_entropy is not None:
                learned["entropy_coefficient"] = coefficients.entropy
            version += 1
            with phases("publishing"):
                self.policy.update(self.learner.weights(version))
        beside()
        metrics |= learned
        after = replace(
            state,
            step=state.step + 1,
            source=self.source.state(),
            policy_version=version,
            entropy_coefficient=next_entropy(coefficients.entropy, metrics, config.train),
            signal_rate=rollouts.signal_rate,
        )
        metrics |= self._times(rollouts.seconds, time.perf_counter() - began, metrics.get("sampled_tokens", 0.0))
        if record is not None:
            with phases("records"):
                self.tracker.tokens(after.step, partial(record.table, groups, advantages, samples))
        spent = Counter(times)  # with groups ahead, the engine decodes while this step samples and while it learns
        spent.update(phases.take())
        metrics |= {f"{name}_seconds": seconds for name, seconds in spent.items()}
        self.tracker.metrics(after.step, metrics)
        self.state = after
        return metrics

    def _times(self, sample_s: float, train_s: float, sampled_tokens: float) -> dict[str, float]:
        """Of a step; `sample_s` is how long the learner waited for its rollouts."""
        sampling_s = sample_s + (train_s if self.learner_thread else 0.0)
        return {
            "sample_seconds": sample_s,
            "train_seconds": train_s,
            "elapsed_seconds": self.elapsed_s,
            "sample_tokens_per_second": sampled_tokens / max(sampling_s, 1e-9),
        }

    def _rollout_metrics(self, rollouts: StepRollouts, advantages: Sequence[Sequence[float]]) -> dict[str, float]:
        found = rollout_metrics(rollouts.groups, advantages, self.state.policy_version)
        if rollouts.dropped:
            found["stale_groups_dropped"] = float(rollouts.dropped)
        if hung := hung_calls():
            found["hung_calls"] = float(hung)
        return {"peak_memory_gib": peak_memory_gib()} | found

    def _prepare_next(self) -> None:
        """Let the source begin with the next step; not before an evaluation, whose episodes may need the room."""
        goes_on = self.steps_left is not None and self.steps_left > 1 and not self.evaluates_after(self.state.step + 1)
        if goes_on and self.learner_thread is None and isinstance(self.source, PreparesSteps):
            with phases("preparing"):
                self.runner.run(self.source.prepare(self.config.train.problems_per_step))

    def _compute(self, work: Callable[[], T]) -> T:
        """The learner's work; where groups are sampled ahead, the event loop turns meanwhile."""
        if self.learner_thread is None:
            return work()
        loop = self.runner.get_loop()

        async def wait() -> T:
            return await loop.run_in_executor(self.learner_thread, work)

        return self.runner.run(wait())

    @contextmanager
    def _policy_asleep(self) -> Iterator[None]:
        """With `model.sleep_mode`, the learner may use the KV cache's memory inside of this block."""
        if not self.config.model.sleep_mode:
            yield
            return
        self.policy.sleep()
        try:
            yield
        finally:
            self.policy.wake()

    @property
    def entropy_coefficient(self) -> float:
        own = self.state.entropy_coefficient
        return self.config.train.entropy_coefficient if own is None else own

    def _save_if_due(self, reward: float) -> None:
        every = self.config.checkpoint.every
        if self.checkpoints is not None and every and self.state.step % every == 0 and self._has_room():
            with deferred_interrupts():
                self.checkpoint(reward)

    def _save_if_best(self, reward: float) -> None:
        """The best model by its held-out reward is kept, also where no checkpoint was due."""
        keep = self.config.checkpoint
        is_best = keep.every and keep.keep_best and reward > self.state.best_reward
        if self.checkpoints is not None and is_best and self._has_room():
            with deferred_interrupts():
                self.checkpoint(reward)

    def _has_room(self) -> bool:
        """Whether the disk has room for a checkpoint and for the final model; the same on all ranks."""

        def on_this_disk() -> bool:
            assert self.checkpoints is not None
            free, least = free_bytes(self.checkpoints), self.checkpoint_bytes + self.model_bytes
            if free < least:
                self.watcher.warn(
                    f"no checkpoint of step {self.state.step}: {free / 2**20:,.0f} MiB are free, and a checkpoint and "
                    f"the final model need {least / 2**20:,.0f} MiB; free some space"
                )
            return free >= least

        return self.ranks.from_first(on_this_disk)

    def checkpoint(self, reward: float = NEVER_BEST) -> Path:
        """Save where the run stands, and delete what need not be kept. The best is the one of the highest reward."""
        if self.checkpoints is None:
            raise PalestraError("this training has no folder to save a checkpoint in")
        keep = self.config.checkpoint
        if reward > self.state.best_reward:
            self.state = replace(self.state, best_reward=reward, best_step=self.state.step)
        path = step_folder(self.checkpoints, self.state.step)
        self.tracker.flush()
        if self.ranks.is_first:
            save_checkpoint(path, self.state, self._write_checkpoint)
            best = step_folder(self.checkpoints, self.state.best_step) if keep.keep_best else None
            prune(self.checkpoints, keep.keep_last, best)
        else:
            join_checkpoint(path, self.learner.save)
        self.ranks.gather(None)  # it is whole for all
        self.source.commit()
        return path

    def _write_checkpoint(self, folder: Path) -> None:
        self.learner.save(folder)
        self.write_beside(folder)

    @property
    def elapsed_s(self) -> float:
        """How long the run has taken, with the time before it was resumed."""
        return self.earlier_s + time.perf_counter() - self.began

    def resume(self, folder: Path, state: TrainState) -> None:
        """Go on from a checkpoint, with the same numbers as if nothing had happened."""
        self.learner.load(folder)
        self.source.restore(state.source)
        self.policy.update(self.learner.weights(state.policy_version))
        self.state = state

    def failure(self, doing: str, error: Exception) -> PalestraError:
        """What failed, doing what, how to get by with less memory if that was it, and what is left."""
        text = text_of(error)
        last = last_checkpoint(self.checkpoints) if self.checkpoints else None
        left = f"The last good checkpoint is {last}" if last else "No checkpoint had been written yet"
        return PalestraError(f"{doing}: {text.rstrip('.')}. {memory_remedy(error, self.config)}{left}")


def total_steps(config: RunConfig, problems: int | None) -> int:
    """Optimizer steps in the whole run: `max_steps`, or enough for all epochs."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    if problems is None:
        raise PalestraError("these environments have no last problem; say when to stop with train.max_steps")
    return config.train.epochs * math.ceil(problems / config.train.problems_per_step)


def memory_remedy(error: Exception, config: RunConfig) -> str:
    """The settings to change when memory ran out; nothing for other errors."""
    if not isinstance(error, MemoryError) and "out of memory" not in str(error).lower():
        return ""
    model, tokens = config.model, config.train.tokens_per_micro_batch or "16384 or more, by the model"
    remedies = {
        f"a lower train.tokens_per_micro_batch (now {tokens})": True,
        "model.gradient_checkpointing=true": not model.gradient_checkpointing,
        "model.sleep_mode=true": not model.sleep_mode,
        "a lower model.kv_memory_gib": True,
        "lora.r=16": not config.lora.r,
        f"a lower rollout.max_new_tokens (now {config.rollout.max_new_tokens})": True,
    }
    return f"To need less memory, in this order: {', '.join(text for text, helps in remedies.items() if helps)}. "
