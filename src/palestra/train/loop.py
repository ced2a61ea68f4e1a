"""The training loop: groups -> advantages -> batch -> one update -> new weights -> again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from palestra.algo.step_loss import next_entropy_coefficient
from palestra.core.calls import hung_calls
from palestra.core.config import RunConfig
from palestra.core.errors import NotFiniteError, PalestraError, StateError, StorageError, TrainingError, text_of
from palestra.core.machine import phases
from palestra.core.ranks import ONE_PROCESS, RankFailed, Ranks
from palestra.core.run_folder import step_folder, step_of
from palestra.core.types import Group
from palestra.evals.case_rates import CaseRates
from palestra.evals.evidence import RunFacts
from palestra.evals.findings import run_findings
from palestra.evals.rollout_stats import Example, find_examples
from palestra.learner.base import Learner, noop
from palestra.policy.base import Policy
from palestra.runs.tracking import Tracker
from palestra.train import update as learning
from palestra.train.batch import has_signal, peak_memory_gib, rollout_metrics, trainable_batch
from palestra.train.checkpoint import TrainState, has_room, last_checkpoint, prune, save_checkpoint
from palestra.train.credit import BUILT_IN, CustomObjective
from palestra.train.demonstrations import DemonstrationSource
from palestra.train.forecast import memory_remedy
from palestra.train.group_source import GroupSource, StepRollouts, gather
from palestra.train.safety_net import Snapshots, collapse_reason
from palestra.train.watcher import Interrupted, Watcher, deferred_interrupts

log = logging.getLogger("palestra")
NEVER_BEST = float("-inf")


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
    began: float = field(default_factory=time.perf_counter)  # earlier by what the run took before it was resumed
    history: list[dict[str, float]] = field(default_factory=list)  # the metrics of the steps that `run` has taken
    reported_findings: set[str] = field(default_factory=set)  # the kinds that the watcher was warned of
    ended_early: str | None = None  # why it did not go on to the last step
    snapshots: Snapshots | None = None  # None: no rollbacks
    held_out_fall: str | None = None  # set by an evaluation that finds the model to be worse
    facts: RunFacts = field(default_factory=RunFacts)
    examples: dict[str, Example] = field(default_factory=dict)  # the newest rollout of each trait, for findings
    on_first_groups: Callable[[Sequence[Group]], None] = lambda groups: None  # sampled from the initial weights
    checkpoint_bytes: int = 0  # a checkpoint is skipped if it and the final model do not fit on the disk
    model_bytes: int = 0
    teacher: Any = None  # of `distill.coefficient`: a Teacher of the extra
    rates: CaseRates | None = None  # of the training cases, with train.sampling = learnable; the source has them, too
    objective: CustomObjective = BUILT_IN  # a user's functions; demonstrations are learned without
    save_model: Callable[[], object] = lambda: None  # called after the last step, before its checkpoint

    def run(self, evaluate: Callable[[int], float] | None = None, lacks_evaluation: bool = False) -> None:
        """Train to the last step, with checkpoints; Ctrl-C raises `Interrupted` after saving one.

        `evaluate` gives the held-out reward of a step, at every `eval.every`; first, where the last one is missing.
        """
        total = self.total_steps or 0
        doing = f"after step {self.state.step}"
        try:
            if evaluate and lacks_evaluation:
                self.take_evaluation(evaluate(self.state.step))
            self._show_phase()
            by_evaluation = evaluate is not None and self.config.eval.every > 0
            while self.state.step < total and self.ended_early is None and not self.source.is_done:
                doing = f"step {self.state.step + 1}"
                try:
                    metrics = self.step()
                except NotFiniteError as error:
                    if self.snapshots is None:
                        raise
                    self._roll_back(str(error))
                    continue
                doing = f"after step {self.state.step}"
                self._judge(metrics, total)
                if self.state.step >= total or self.ended_early is not None:
                    with self._warns_if_unwritable():
                        self.save_model()
                every = self.config.checkpoint.every
                reward = NEVER_BEST if by_evaluation else metrics.get("reward_mean", NEVER_BEST)
                self._save_if(every and self.state.step % every == 0, reward)
                if evaluate and self.evaluates_after(self.state.step):
                    self.take_evaluation(evaluate(self.state.step))
                    self._show_phase()
            self.tracker.flush()
            self._save_if(self.config.checkpoint.every and not self.is_saved)
        except KeyboardInterrupt:
            if self.checkpoints is None:
                raise
            with deferred_interrupts():
                raise Interrupted(self.checkpoint()) from None
        except Exception as error:
            raise self.failure(doing, error) from error

    @property
    def demonstrations(self) -> DemonstrationSource | None:
        """The source, where its groups are demonstrations: their rewards say nothing about the model."""
        return self.source if isinstance(self.source, DemonstrationSource) else None

    @property
    def steps_left(self) -> int | None:
        """With the one in progress; None where steps are taken one by one."""
        return None if self.total_steps is None else self.total_steps - self.state.step

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due between this step and the next."""
        every = self.config.eval.every
        return bool(every) and step > 0 and step % every == 0 and step < (self.total_steps or 0)

    def _show_phase(self) -> None:
        source = self.demonstrations
        if source is None:
            self.watcher.phase("training", self.total_steps or 0)
        else:
            total = None if source.ends_by_itself else self.total_steps
            self.watcher.phase(f"training ({source.stage})", total)

    def _judge(self, metrics: dict[str, float], total: int) -> None:
        """Show a step, warn of what keeps the run from learning, each kind once, and end or roll it back if need be.

        The rewards of demonstrations say nothing about the model.
        """
        step, train, source, reason = self.state.step, self.config.train, self.demonstrations, None
        self.watcher.advance(step, metrics)
        if source is None:
            groups, planned = metrics.get("groups", 0), train.problems_per_step
            if groups > planned >= max((row.get("groups", 0) for row in self.history), default=0):
                self.watcher.note(
                    f"step {step} sampled {groups:.0f} groups instead of {planned}: groups with equal rewards teach "
                    "nothing, so other problems are sampled, too (train.signal_share, train.refill_limit)"
                )
            self.history.append(metrics)
            for finding in run_findings(self.history, facts=self.facts, examples=self.examples):
                if finding.kind not in self.reported_findings:
                    self.reported_findings.add(finding.kind)
                    self.watcher.warn(str(finding))
            reason = learning.solved_reason(self.history, step, total, train.stop_when_solved)
        if source is None or source.samples_next:  # the next step costs tokens
            reason = reason or learning.token_limit_reason(self.state.sampled_tokens, step, train.max_sampled_tokens)
        if reason is not None and self.ended_early is None:
            self.ended_early = reason
            self.watcher.note(reason)
        if step % self.config.track.log_every == 0 or step == total:  # for runs without a display
            names = ("loss", "reward_mean", "pass_rate", "demonstrations")
            shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
            log.info("step %d of %d: %s", step, total, shown)
        if source is None and self.snapshots is not None:
            health = self.state.safety.health.with_step(metrics)
            self.state = replace(self.state, safety=replace(self.state.safety, health=health))
            if collapse := collapse_reason(health):
                self._roll_back(collapse)

    def step(self) -> dict[str, float]:
        """One step: sample and learn. The state moves on only when all of it has worked."""
        count = self.config.train.problems_per_step
        phases.take()
        state = self.state
        function = self.objective.advantages if self.demonstrations is None else None
        gathering = gather(self.source, count, self.config, state.policy_version, state.signal_rate, function)
        rollouts = self.runner.run(gathering)
        if state.step == 0 and self.demonstrations is None:
            self.on_first_groups(rollouts.groups)
        times = phases.take()
        times["agent_loop"] = max(0.0, rollouts.seconds - sum(times.values()))
        with deferred_interrupts():
            # Before a step changes the weights, take a snapshot if their smoothed reward is the best so far.
            if self.snapshots is not None and not self.config.eval.every and self.demonstrations is None:
                reward = state.safety.new_best(state.step, rollouts.groups)
                if reward is not None:
                    self._snapshot(reward)
            return self.learn(rollouts, times)

    def learn(self, rollouts: StepRollouts, times: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
        """Learn from the groups, publish the weights, record the step; `times` are the seconds of its sampling."""
        began, state, config = time.perf_counter(), self.state, self.config
        groups, advantages = rollouts.groups, rollouts.advantages
        self.source.observe(groups, advantages, state.step + 1)  # before the next step is prepared
        taught = self.teacher is not None and config.distill_coefficient
        distilled = self.teacher.rows(groups, advantages, config) if taught else None
        coefficients, scale = self._coefficients(groups, advantages, distilled)
        batch = trainable_batch(groups, advantages, config.train, echo=coefficients.echo > 0)
        if taught and config.distill_only:
            batch = batch.part(0, 0)
        version, entropy = state.policy_version, coefficients.entropy
        every, tokens_every = config.track.rollouts_every, config.track.tokens_every
        is_recorded = every and tokens_every and not (state.step + 1) % every and not (state.step + 1) % tokens_every
        record = learning.TokenRecord(batch) if is_recorded else None
        metrics: dict[str, float] = {}
        learned: dict[str, float] = {}
        host_work = partial(self._host_work, rollouts, metrics)
        if batch.policy_mask.any() or batch.echo_mask.any() or (distilled is not None and distilled.batch.rows):
            with ExitStack() as stack:
                if config.model.sleep_mode:  # the learner may use the KV cache's memory inside of this block
                    self.policy.sleep()
                    stack.callback(self.policy.wake)
                stack.enter_context(phases("learner"))
                own = host_work if self.learner_thread is None else noop
                custom = self.objective.loss if self.demonstrations is None else None
                learn = partial(learning.update, self.learner, batch, config, coefficients, version, record, own)
                learned = self._compute(partial(learn, distill=distilled, custom_loss=custom))
            if (target := config.train.target_entropy) is not None:
                learned["entropy_coefficient"] = entropy
                if "entropy" in learned:
                    entropy = next_entropy_coefficient(entropy, learned["entropy"], target)
            version += 1
            with phases("publishing"):
                self.policy.update(self.learner.weights(version))
        host_work()
        metrics |= learned | {"update_scale": scale if learned else 0.0} | (distilled.metrics if distilled else {})
        after = replace(
            state,
            step=state.step + 1,
            source=self.source.state(),
            policy_version=version,
            entropy_coefficient=entropy,
            signal_rate=rollouts.signal_rate,
            sampled_tokens=state.sampled_tokens + int(metrics.get("sampled_tokens", 0)),
            cases=state.cases if self.rates is None else self.rates.to_dict(),
        )
        train_s = time.perf_counter() - began
        sampling_s = rollouts.seconds + (train_s if self.learner_thread else 0.0)
        metrics |= {
            "sample_seconds": rollouts.seconds,
            "train_seconds": train_s,
            "elapsed_seconds": self.elapsed_s,
            "sample_tokens_per_second": metrics.get("sampled_tokens", 0.0) / max(sampling_s, 1e-9),
        }
        if record is not None:
            with phases("records"):
                self.tracker.tokens(after.step, partial(record.table, groups, advantages))
        spent = Counter(times)  # with groups ahead, the engine decodes while this step samples and while it learns
        spent.update(phases.take())
        for name, seconds in spent.items():
            metrics[f"{name}_seconds"] = seconds
        self.tracker.metrics(after.step, metrics)
        self.state = after
        return metrics

    def _coefficients(
        self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], distilled: Any
    ) -> tuple[learning.Coefficients, float]:
        """The coefficients of this step, and the share of a full update by which its learning rate is scaled."""
        state, train = self.state, self.config.train
        steps = None if self.total_steps is None else self.total_steps - state.stage_start
        entropy = train.entropy_coefficient if state.entropy_coefficient is None else state.entropy_coefficient
        coefficients = learning.coefficients_at(state.step - state.stage_start, self.config, steps, entropy)
        scale = 1.0  # with ECHO, where every group has a gradient
        if coefficients.echo <= 0:
            taught = () if distilled is None else distilled.batch.groups  # by a teacher: these have a gradient, too
            signal = solved = 0
            for i, (group, row) in enumerate(zip(groups, advantages, strict=True)):
                signal += i in taught or has_signal(group, row)
                solved += all(map(attrgetter("passed"), group.rollouts))
            # outside of a run, the caller chooses the groups of a step
            problems = len(groups) if self.total_steps is None else train.problems_per_step
            scale = learning.update_scale(signal, solved, problems, train.full_update_share)
        rate = coefficients.learning_rate * scale * state.safety.rate_factor
        return replace(coefficients, learning_rate=rate), scale

    def _host_work(self, rollouts: StepRollouts, metrics: dict[str, float]) -> None:
        """Do the work that needs no weights while a GPU changes them, once: prepare the next step, fill the metrics of
        the rollouts in, and record them."""
        if metrics:
            return
        step, source = self.state.step + 1, self.demonstrations
        metrics["peak_memory_gib"] = peak_memory_gib()
        if source is None:
            # an evaluation's episodes may need the room of prepared ones
            continues = (self.steps_left or 0) > 1 and not self.evaluates_after(step)
            if continues and self.learner_thread is None:
                with phases("preparing"):
                    self.runner.run(self.source.prepare(self.config.train.problems_per_step))
            metrics |= rollout_metrics(rollouts.groups, rollouts.advantages, self.state.policy_version)
            every = self.config.track.rollouts_every
            if every and step % every == 0:  # examples refer to rollouts on disk
                every_rollout = chain.from_iterable(map(attrgetter("rollouts"), rollouts.groups))
                self.examples |= find_examples(every_rollout, "train", step)
            if self.rates is not None:
                metrics |= self.rates.metrics(self.config.rollout.group_size)
            if rollouts.dropped:
                metrics["stale_groups_dropped"] = float(rollouts.dropped)
            if hung := hung_calls():
                metrics["hung_calls"] = float(hung)
        else:
            metrics |= source.metrics
        with phases("records"):
            self.tracker.rollouts(step, rollouts.groups)

    def _compute(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run the learner; in a thread if groups are sampled ahead, so that the event loop continues."""
        if self.learner_thread is None:
            return work()
        loop = self.runner.get_loop()

        async def wait() -> dict[str, float]:
            return await loop.run_in_executor(self.learner_thread, work)

        return self.runner.run(wait())

    def _snapshot(self, reward: float) -> None:
        assert self.snapshots is not None
        self.snapshots.take_best()
        safety = replace(self.state.safety, best_step=self.state.step, best_reward=reward)
        self.state = replace(self.state, safety=safety)

    def take_evaluation(self, reward: float) -> None:
        """Keep the weights if their held-out reward is the best, or roll back if it has clearly fallen."""
        if self.held_out_fall and self.snapshots is not None:
            self._roll_back(self.held_out_fall)
        elif self.snapshots is not None and reward > self.state.safety.best_reward:
            self._snapshot(reward)
        self.held_out_fall = None
        keep = self.config.checkpoint  # the best model is kept, also where no checkpoint was due
        self._save_if(keep.every and keep.keep_best and reward > self.state.best_reward, reward)

    def _roll_back(self, reason: str) -> None:
        """Restore earlier weights and lower the learning rate; end the run after `train.max_rollbacks` rollbacks."""
        assert self.snapshots is not None
        state, most = self.state, self.config.train.max_rollbacks
        self.ended_early, safety = state.safety.rolled_back(state.step, reason, most, self.snapshots.has_best)
        self.restore_weights(best=safety.restored_step > 0)
        cases = self.state.cases if self.rates is None else self.rates.to_dict()
        self.state = replace(self.state, safety=safety, source=self.source.state(), cases=cases)
        self.tracker.metrics(state.step, {"rollback": 1.0, "learning_rate_factor": safety.rate_factor})
        self.watcher.warn(safety.events[-1])

    def restore_weights(self, *, best: bool) -> None:
        """Continue training and sampling with the best or the initial weights."""
        assert self.snapshots is not None
        self.snapshots.restore(best=best)
        version = self.state.policy_version + 1
        self.policy.update(self.learner.weights(version))
        self.state = replace(self.state, policy_version=version)

    def _save_if(self, is_due: object, reward: float = NEVER_BEST) -> None:
        """Save a checkpoint that is due, where it and the final model fit on the disk; the same on all ranks."""
        if self.checkpoints is None or not is_due:
            return
        least = self.checkpoint_bytes + self.model_bytes
        room = partial(has_room, self.checkpoints, self.state.step, least, self.watcher.warn)
        if self.ranks.from_first(room, bool):
            with deferred_interrupts(), self._warns_if_unwritable():
                self.checkpoint(reward)

    @contextmanager
    def _warns_if_unwritable(self) -> Iterator[None]:
        """Warn of what cannot be written inside of this block: the run goes on, and tries again at the next chance."""
        try:
            yield
        except (StorageError, RankFailed) as error:  # the second: the first rank has a StorageError
            self.watcher.warn(f"after step {self.state.step}: {error}")

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint has the last step."""
        last = last_checkpoint(self.checkpoints) if self.checkpoints else None
        return last is not None and step_of(last) == self.state.step

    def checkpoint(self, reward: float = NEVER_BEST) -> Path:
        """Save where the run stands, and delete what need not be kept. The best is the one of the highest reward."""
        if self.checkpoints is None:
            raise StateError("this training has no folder to save a checkpoint in")
        keep, state = self.config.checkpoint, self.state
        if reward > state.best_reward:
            state = replace(state, best_reward=reward, best_step=state.step)
        path = step_folder(self.checkpoints, state.step)

        def write(folder: Path) -> None:
            self.learner.save(folder)
            if self.ranks.is_first:
                self.write_beside(folder)
                if self.snapshots is not None:
                    self.snapshots.save(folder)

        try:
            self.tracker.flush()
        finally:  # a checkpoint is written also when a record could not be
            save_checkpoint(path, state, write, self.ranks)
            self.state = state  # a checkpoint that could not be written is not the best one
            if self.ranks.is_first:
                best = step_folder(self.checkpoints, state.best_step) if keep.keep_best else None
                prune(self.checkpoints, keep.keep_last, best)
            self.source.commit()
        return path

    @property
    def elapsed_s(self) -> float:
        """How long the run has taken, with the time before it was resumed."""
        return time.perf_counter() - self.began

    def resume(self, folder: Path, state: TrainState) -> None:
        """Go on from a checkpoint, with the same numbers as if nothing had happened."""
        self.learner.load(folder)
        if self.snapshots is not None:
            self.snapshots.load(folder)
        self.source.restore(state.source)
        if self.rates is not None:
            self.rates.load(state.cases, state.step)
        self.policy.update(self.learner.weights(state.policy_version))
        self.state = state

    def failure(self, doing: str, error: Exception) -> PalestraError:
        """An error with the step, the cause, settings that save memory if that was it, and the last checkpoint."""
        last = last_checkpoint(self.checkpoints) if self.checkpoints else None
        left = f"The last good checkpoint is {last}" if last else "No checkpoint had been written yet"
        return TrainingError(f"{doing}: {text_of(error).rstrip('.')}. {memory_remedy(error, self.config)}{left}")
