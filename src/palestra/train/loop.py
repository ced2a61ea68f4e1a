"""THE loop: problems -> rollouts -> advantages -> one step -> new weights -> again."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Problem
from palestra.evals.report import EvalReport
from palestra.learner.base import Learner
from palestra.learner.memory import peak_memory_gib
from palestra.rollout.collect import Collector
from palestra.rollout.evaluate import Collects, evaluate
from palestra.tracking.base import Tracker
from palestra.train.checkpoint import TrainState, last_checkpoint, prune, save_checkpoint, step_folder
from palestra.train.interrupt import deferred_interrupts
from palestra.train.metrics import rollout_metrics
from palestra.train.samples import group_advantages, has_signal, trainable_samples


class Watcher:
    """What a person watching is told. This one is silent; a face overrides what it shows."""

    def started(self, folder: Path) -> None:
        """The run has its folder; whatever happens now, it can be resumed from there."""

    def phase(self, name: str, total: int) -> None:
        """A stretch of work begins: `total` rollouts to score or steps to train."""

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        """`done` of the phase's total are finished."""

    def note(self, text: str) -> None: ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; a checkpoint of the last whole step is on disk."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"interrupted; saved {checkpoint}")
        self.checkpoint = checkpoint


@dataclass(frozen=True, slots=True)
class Harvest:
    """The groups of one step, how many problems they took, and how long."""

    groups: Sequence[Group]
    drawn: int
    seconds: float


@dataclass(slots=True)
class Training:
    """A run in progress: its parts, and how far it has come."""

    config: RunConfig
    collector: Collector
    scorer: Collector  # the same policy, sampling as the evaluation wants it
    learner: Learner
    tracker: Tracker
    checkpoints: Path
    runner: asyncio.Runner
    watcher: Watcher
    state: TrainState = field(default_factory=TrainState)

    def run(self) -> None:
        """Train to the last step, with checkpoints; Ctrl-C raises `Interrupted` after saving one."""
        total, every = total_steps(self.config, len(self.problems)), self.config.eval.every
        self.watcher.phase("training", total)
        try:
            while self.state.step < total:
                harvest = self.runner.run(self._collect())
                with deferred_interrupts():
                    metrics = self._learn(harvest)
                self.watcher.advance(self.state.step, metrics)
                if every and self.state.step % every == 0 and self.state.step < total:
                    report = self.evaluate(f"evaluating at step {self.state.step}")
                    self.tracker.metrics(self.state.step, {"eval/pass_rate": report.pass_rate.rate})
                    self.watcher.phase("training", total)
        except KeyboardInterrupt:
            with deferred_interrupts():
                raise Interrupted(self.checkpoint()) from None
        except PalestraError as error:
            raise PalestraError(f"step {self.state.step + 1}: {error}. {self._last_good()}") from error
        if step_folder(self.checkpoints, self.state.step) != last_checkpoint(self.checkpoints):
            self.checkpoint()

    async def _collect(self) -> Harvest:
        """Groups for one step; those without signal are replaced by fresh problems, within the limit."""
        train, key = self.config.train, f"{self.config.seed}/{self.state.step}"
        began, drawn = time.perf_counter(), 0
        groups: list[Group] = []
        for attempt in range(1 + (train.refill_limit if train.filter_equal_groups else 0)):
            missing = train.problems_per_step - sum(has_signal(g) for g in groups)
            if missing == 0:
                break
            problems = draw(self.problems, self.state.cursor + drawn, missing, self.config.seed)
            drawn += missing
            groups += await self.collector.collect(problems, self.config.rollout.group_size, f"{key}/{attempt}")
        return Harvest(groups, drawn, time.perf_counter() - began)

    def _learn(self, harvest: Harvest) -> dict[str, float]:
        """One optimizer step from the groups; the state moves on only when all of it has worked."""
        began, groups = time.perf_counter(), harvest.groups
        train, state = self.config.train, self.state
        advantages = self._advantages(groups)
        metrics = {"peak_memory_gib": peak_memory_gib()} | rollout_metrics(groups, advantages, state.policy_version)
        samples = trainable_samples(groups, advantages, train)
        version = state.policy_version
        if any(any(sample.trained) for sample in samples):
            metrics |= self.learner.step(samples, train)
            version = self.learner.publish()
            self.collector.policy.refresh(version)
        else:
            self.learner.skip()
        self.state = TrainState(
            state.step + 1, state.cursor + harvest.drawn, version, state.best_reward, state.best_step
        )
        metrics |= {
            "sample_seconds": harvest.seconds,
            "train_seconds": time.perf_counter() - began,
            "sample_tokens_per_second": metrics["sampled_tokens"] / harvest.seconds,
        }
        self.tracker.rollouts(self.state.step, groups)
        self.tracker.metrics(self.state.step, metrics)
        if self.config.checkpoint.every and self.state.step % self.config.checkpoint.every == 0:
            self.checkpoint(metrics["reward_mean"])
        return metrics

    def _advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        return group_advantages(groups, self.config.train, self.collector.environment.reward_weights)

    def checkpoint(self, reward: float = float("-inf")) -> Path:
        """Save where the run stands, and delete what need not be kept."""
        keep = self.config.checkpoint
        if reward > self.state.best_reward:
            self.state = replace(self.state, best_reward=reward, best_step=self.state.step)
        path = step_folder(self.checkpoints, self.state.step)
        save_checkpoint(path, self.state, self.learner.save)
        prune(
            self.checkpoints,
            keep.keep_last,
            step_folder(self.checkpoints, self.state.best_step) if keep.keep_best else None,
        )
        return path

    def evaluate(self, phase: str) -> EvalReport:
        """Score the held-out problems, or the training ones where none are held out."""
        problems = self.scorer.environment.problems("held_out") or self.problems
        return run_evaluation(self.scorer, problems, self.config, self.runner, self.watcher, phase)

    @property
    def problems(self) -> Sequence[Problem]:
        return self.collector.environment.problems("train")

    def _last_good(self) -> str:
        last = last_checkpoint(self.checkpoints)
        return f"The last good checkpoint is {last}" if last else "No checkpoint had been written yet"


def run_evaluation(
    scorer: Collects,
    problems: Sequence[Problem],
    config: RunConfig,
    runner: asyncio.Runner,
    watcher: Watcher,
    phase: str,
) -> EvalReport:
    """Score problems as `config.eval` says, telling the watcher of each rollout."""
    options = config.eval
    problems = problems[: options.cases]
    watcher.phase(phase, len(problems) * options.samples_per_case)
    done = itertools.count(1)
    return runner.run(
        evaluate(
            scorer,
            problems,
            samples_per_case=options.samples_per_case,
            seed=config.seed,
            on_rollout=lambda rollout: watcher.advance(next(done), {}),
        )
    )


def total_steps(config: RunConfig, problems: int) -> int:
    """Optimizer steps in the whole run: `max_steps`, or enough for all epochs."""
    return config.train.max_steps or config.train.epochs * math.ceil(problems / config.train.problems_per_step)


def draw(problems: Sequence[Problem], start: int, count: int, seed: int) -> list[Problem]:
    """Problems number `start` to `start + count` of an endless stream, shuffled anew each epoch."""
    size = len(problems)
    orders = {epoch: _order(size, seed, epoch) for epoch in range(start // size, (start + count - 1) // size + 1)}
    return [problems[orders[i // size][i % size]] for i in range(start, start + count)]


def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
