"""One run, however it was started: build the parts, score, train, score again, save, report.

>>> run = Run.build(config, EnvironmentTask(environment), folder)      # doctest: +SKIP
>>> outcome = run.train()
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from palestra.core.config import RunConfig
from palestra.core.errors import NotFiniteError, PalestraError, StateError, TrainingError, UserCodeError, text_of
from palestra.core.extras import provided
from palestra.core.files import is_unwritable
from palestra.core.ranks import join
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.types import Group
from palestra.evals.evidence import Finding, RunFacts
from palestra.evals.findings import ENVIRONMENT_PROBLEMS, broken_tool, evaluation_findings, outcome_findings
from palestra.evals.report import Capability, EvalReport
from palestra.evals.run_report.write import write_report
from palestra.learner.base import Learner
from palestra.learner.local import LocalLearner
from palestra.learner.optimizer import UserOptimizer
from palestra.models.loading import LoadedModel
from palestra.policy.base import Policy
from palestra.runs.index import listed, mark_failed
from palestra.runs.tracking import Tracker, check_trackers, open_trackers
from palestra.train.checkpoint import TrainState, choose_checkpoint, drop_after
from palestra.train.credit import CustomObjective
from palestra.train.evaluation import Evaluator, read_evaluation, write_evaluation
from palestra.train.forecast import STEP_KEYS, Overview, parameter_count
from palestra.train.group_queue import GroupQueue
from palestra.train.limits import setting_warnings
from palestra.train.loop import Training
from palestra.train.safety_net import Snapshots
from palestra.train.setup import Backend, backend_of, load_for_run
from palestra.train.stages import Stages, stage_config, stage_names
from palestra.train.tasks import EnvironmentTask, Parts, Task, require_ranks_support
from palestra.train.update import total_steps
from palestra.train.watcher import SilentWatcher, Watcher, sigterm_as_ctrl_c


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training leaves behind. There is no before and after where nothing could be scored."""

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    model_path: Path
    before: EvalReport | None
    after: EvalReport | None
    metrics: list[dict[str, float]] = field(repr=False)
    seconds: float
    report_path: Path
    findings: tuple[Finding, ...] = ()  # why it did not learn more, each with the setting to change
    events: tuple[str, ...] = ()  # rollbacks, and why the run returns an earlier model than the last step's


@dataclass(slots=True)
class Run:
    """A training with all its parts, in one folder."""

    folder: RunFolder
    backend: Backend
    training: Training
    stages: Stages
    evaluator: Evaluator | None
    overview: Overview
    resume_from: tuple[Path, TrainState] | None = None
    resume_after: int | None = None  # the step after which all is done again; None for a new run
    queue: GroupQueue | None = None  # where groups are sampled ahead of their step
    model_path: Path | None = None  # of the final model, once it is saved

    @classmethod
    def build(
        cls,
        config: RunConfig,
        task: Task,
        folder: RunFolder,
        *,
        runner: asyncio.Runner,
        watcher: Watcher | None = None,
        loaded: LoadedModel | None = None,
        learner: Learner | None = None,
        policy: Policy[Any] | None = None,
        resume: Resume | None = None,
        state: TrainState | None = None,
        steps: int | None = None,
        keeps_checkpoints: bool = True,
        objective: CustomObjective | None = None,
    ) -> Run:
        """Put the parts together; what is not given is built from the config.

        `resume` goes on from a checkpoint; `state` says where learner and policy stand already. Nothing is written
        here: a resume that fails leaves the run as it was.
        """
        ranks = join(config)
        if ranks.size > 1:
            require_ranks_support(config, task, learner or policy)
        watcher = (watcher or Watcher()) if ranks.is_first else SilentWatcher()
        resume_from = None
        if resume is not None:
            choice = partial(choose_checkpoint, folder, resume.checkpoint, watcher.note)
            resume_from = ranks.from_first(choice, tuple[Path, TrainState] | None)
            config = resume.config(config, resume_from[1].stage_steps if resume_from else 0)
        check_trackers(config.track)
        objective = objective or CustomObjective.of(config.train)
        if resume is not None:
            objective.require(folder.record.get("objective", {}))
        if isinstance(task, EnvironmentTask):
            task.start_workers(config)
        loaded = loaded or load_for_run(config)
        if hasattr(loaded.model, "config"):
            for warning in setting_warnings(config, parameter_count(loaded.model), loaded.context_tokens):
                watcher.warn(warning)
        if resume is not None:
            # as many CPU threads as the run began with: their sums differ in the last bits
            threads = folder.record.get("threads")
            if threads is not None and config.model.threads is None and "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(threads)
        max_group = getattr(getattr(task, "environment", None), "max_episodes", None)
        limits = {"max_problems": task.problem_count, "max_group": max_group}
        asked, backend = config, backend_of(config, loaded, learner, policy, ranks, **limits)
        config, policy = backend.config, backend.policy
        plan = stage_names(config, task)
        if steps is None:
            steps = total_steps(config, task.problem_count) if "grpo" in plan else 0
        state = state or TrainState()
        done = resume_from[1].step if resume_from else state.step
        parts = Parts(config, policy, backend.tokenizer, runner, watcher, done, ranks, folder.checkpoints)
        source, evaluator = task.source(parts), task.evaluator(parts)
        journal = folder.queue_file if keeps_checkpoints and config.checkpoint.every else None
        queue, ahead = None, config.rollout.max_staleness
        if ahead and source.concurrent:
            sizes = {"per_step": config.train.problems_per_step, "max_staleness": ahead}
            queue = GroupQueue(source, **sizes, journal_file=journal, steps_left=lambda: training.steps_left)
        (queue or source).restore(state.source)
        environment = task.environment if isinstance(task, EnvironmentTask) else None
        teacher, distills = None, stage_config(config, "distill") if "distill" in plan else config
        if distills.distill_coefficient:
            tokenizer, context = backend.tokenizer, backend.context_tokens
            teacher = provided("distill.coefficient")(distills, backend.learner, tokenizer, environment, context)
        training = Training(
            config,
            queue or source,
            policy,
            backend.learner,
            Tracker(),
            steps,
            folder.checkpoints if keeps_checkpoints else None,
            runner,
            watcher,
            state,
            lambda path: backend.complete_checkpoint(path, folder.record),
            ThreadPoolExecutor(1, "palestra-learner") if queue else None,
            ranks,
            facts=RunFacts(config, task.kind, backend.context_tokens, ranks.size),
            objective=objective,
            rates=getattr(source, "rates", None),
            teacher=teacher,
        )
        eval_cases = None if evaluator is None else len(evaluator.problems[: config.eval.cases])
        chosen = tuple(key for key in STEP_KEYS if asked.value(key) is None)
        overview = Overview.of(backend.model, config, steps, task.problem_count, eval_cases)
        overview = replace(overview, chosen=chosen)
        ends_here = resume is not None and resume.finish
        stages = Stages(training, parts, task, folder, plan, takes_no_steps=ends_here)
        resume_after = done if resume or done else None
        return cls(folder, backend, training, stages, evaluator, overview, resume_from, resume_after, queue)

    def train(self) -> Outcome:
        """Run everything from the first evaluation to the report, while the index lists the run."""
        training, ranks, overview = self.training, self.training.ranks, self.overview
        training.watcher.note(overview.text(self.folder.path))
        ranks.from_first(lambda: overview.require_disk(self.folder.path))
        training.checkpoint_bytes, training.model_bytes = overview.checkpoint_bytes, overview.model_bytes
        self.stages.save_model = self._save_model
        with ExitStack() as stack:
            stack.enter_context(sigterm_as_ctrl_c())
            stack.push(lambda kind, error, trace: self.backend.close(error is None))
            training.watcher.started(self.folder.path)
            if ranks.is_first:
                stack.enter_context(listed(self.folder.path))
            failed = partial(mark_failed, self.folder.path) if ranks.is_first else lambda reason: None
            stack.enter_context(ranks.guarded(failed))  # where it would wait for ever for a rank that has ended
            stack.enter_context(self._explained())
            if training.learner_thread is not None:
                stack.callback(training.learner_thread.shutdown)
            stack.callback(training.source.close)
            ranks.from_first(self._open_records)
            stack.callback(training.tracker.close)
            local = training.learner if ranks.size == 1 and training.config.train.max_rollbacks else None
            if isinstance(local, LocalLearner) and not isinstance(local.optimizer, UserOptimizer):
                training.snapshots = Snapshots(local)  # before a resume loads other weights
            # a policy in another process may still hold what an earlier run gave it
            training.policy.update(training.learner.weights(training.state.policy_version))
            before = self._evaluate("before")
            self._check_before(before)
            if before is not None and self.resume_from is None:
                training.watcher.note(overview.time_text(before))
            if self.resume_from is not None:
                step = self.resume_from[1].step
                scored = f"all {step} steps were taken already, so it is only scored again; train.max_steps={2 * step}"
                more = step < (training.total_steps or 0)
                training.watcher.note(f"going on from step {step}" if more else f"{scored} takes more")
                self.stages.resume(*self.resume_from)
                ranks.from_first(lambda: drop_after(self.folder, training.state.step))
            training.on_first_groups = lambda groups: self._report_capability(before, groups)
            if self.stages.plan[0] != "grpo" and self.resume_from is None:
                self._report_capability(before, [])
            # whether the run was killed during the evaluation that was due after its checkpoint
            step = training.state.step
            is_due = self.resume_from is not None and training.evaluates_after(step)
            lacks_evaluation = ranks.from_first(lambda: is_due and not self._is_evaluated(step), bool)
            self.stages.run(self._evaluate_between if self.evaluator else None, lacks_evaluation, self._score_stage)
            try:
                path = self.model_path or self._save_model()  # already saved, unless no step was left
            except Exception as error:
                raise training.failure("saving the model", error) from error
            after, choice = self._best_of(before)
            self.stages.note_scores(before, after)
            if choice:
                path = self._save_model()  # the restored weights
            metrics, seconds = self.folder.metrics(), training.elapsed_s
            events = (*training.state.safety.events, *choice)
            findings = self._findings(metrics, after, choice)
            report = partial(write_report, self.folder, before, after, metrics, seconds, findings)
            page = ranks.from_first(partial(report, device=gpu_name(self.backend.model)), Path)
        model, tokenizer = self.backend.model, self.backend.tokenizer
        return Outcome(model, tokenizer, path, before, after, metrics, seconds, page, findings, events)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain an error by the run folder: it is gone, or takes no more, so that its weights are saved elsewhere."""
        training = self.training
        try:
            yield
        except (PalestraError, OSError) as error:
            if not self.folder.has_begun:
                raise StateError(f"the run folder {self.folder.path} was deleted or moved; start a new run") from error
            is_lost = training.state.step > 0 and not training.is_saved and self.model_path is None
            if not (is_lost and training.ranks.is_first and (is_unwritable(error) or is_unwritable(error.__cause__))):
                raise
            try:
                folder = Path(tempfile.mkdtemp(prefix="palestra-model-"))  # only its owner can read it
                path = self.backend.save_model(folder / "model", self.folder.record)
                where = f"The weights are in {path}; to continue: --model.name {path} --output_dir FOLDER"
            except (PalestraError, OSError) as other:
                where = f"The weights could not be saved elsewhere either ({text_of(other)}); set TMPDIR"
            raise TrainingError(f"{text_of(error)}. {where}") from error

    def _save_model(self) -> Path:
        """Save the final model, before its checkpoint and the last evaluation can fill the disk or fail."""
        self.training.watcher.busy("saving the model")
        save = partial(self.backend.save_model, self.folder.model, self.folder.record)
        self.model_path = path = self.training.ranks.from_first(save, Path)
        return path

    def _open_records(self) -> None:
        """Write the run's record, and truncate its files to the step that it continues from."""
        training, folder, after = self.training, self.folder, self.resume_after
        if self.resume_from is not None and not self.resume_from[0].exists():
            raise StateError(f"{self.resume_from[0]} is gone: another process went on with the run; resume it again")
        training.config.save(folder.config_file)  # with what was suited to the model, and changed for a resume
        weights = dict(training.source.reward_weights)
        about: dict[str, Any] = {"kind": training.facts.kind, "context_tokens": training.facts.context_tokens}
        if training.ranks.size > 1 or "ranks" in folder.record:
            about["ranks"] = training.ranks.size
        if functions := training.objective.names():
            about["objective"] = functions
        threads = torch.get_num_threads()
        folder.add_to_record(steps=training.total_steps, threads=threads, reward_weights=weights, **about)
        training.tracker = open_trackers(training.config, folder, folder.record, resume_after=after)
        training.began -= 0.0 if after is None else folder.elapsed_s()

    def _evaluate(self, name: Literal["before", "after"], *, again: bool = False) -> EvalReport | None:
        """Score the model, or read what an earlier process of this run found."""
        if self.evaluator is None:
            return None
        path, report = self.folder.eval_file(name), None
        if self.resume_from and not again:
            report = read_evaluation(path, self.evaluator.split, self.evaluator.problems)
        if report is None:
            try:
                report = self._score(f"scoring {name}")
                if self.training.ranks.is_first:
                    write_evaluation(path, report)
            except Exception as error:
                raise self.training.failure(f"scoring {name}", error) from error
        return report

    def _best_of(self, before: EvalReport | None) -> tuple[EvalReport | None, list[str]]:
        """Return the evaluation of the model to return, and a sentence if that is not the last step's model.

        If the last model scores less than the initial one, the best weights of the run are scored. If these also score
        less, the run returns the initial weights.
        """
        training, after = self.training, None
        try:
            after = self._evaluate("after", again=True)
        except PalestraError as error:
            if before is None or training.snapshots is None or not isinstance(error.__cause__, NotFiniteError):
                raise
        if before is None or training.snapshots is None or (after and score_of(after) >= score_of(before)):
            if "returned_step" in self.folder.record:  # of an earlier end of the run
                self.folder.add_to_record(returned_step=None, returned_because=None)
            return after, []
        found, name = before, "the model as it was before the training"
        step = training.state.safety.best_step
        if training.snapshots.has_best:
            training.restore_weights(best=True)
            best = self._score(f"scoring the weights of step {step}")
            if score_of(best) >= score_of(before):
                found, name = best, f"the model of step {step}, the best of the run"
        if found is before:
            training.restore_weights(best=False)
        write_evaluation(self.folder.eval_file("after"), found)
        what = "training" if before.split == "train" else "held-out"
        reason = "has weights that are not finite"
        if after is not None:
            reason = f"scored less on the {what} cases than the model before the training (reward "
            reason += f"{after.mean_reward:.3g} instead of {before.mean_reward:.3g})"
        sentence = f"the last step's model {reason}, so the run returns {name}"
        training.watcher.warn(sentence)
        self.folder.add_to_record(returned_step=0 if found is before else step, returned_because=sentence)
        return found, [sentence]

    def _findings(
        self, metrics: Sequence[Mapping[str, float]], after: EvalReport | None, choice: Sequence[str]
    ) -> tuple[Finding, ...]:
        """Why the run did not learn more; rollbacks and the choice of another model than the last come first."""
        events, early = self.training.state.safety.events, self.training.ended_early
        kinds = [("returned_earlier", text) for text in choice] + [("rolled_back", text) for text in events]
        own = [Finding(kind, f"{text}.", ("train.learning_rate",)) for kind, text in kinds]
        solved, scored = None if early in events else early, after.rollouts if after else ()
        return (*own, *outcome_findings(metrics, scored, solved, self.training.facts, self.training.examples))

    def _score(self, phase: str) -> EvalReport:
        assert self.evaluator is not None
        runner = self.training.runner
        if self.queue is not None:
            runner.run(self.queue.drained())
        return self.evaluator.run(runner, self.training.watcher, phase)

    def _check_before(self, before: EvalReport | None) -> None:
        """Stop a run in which nothing can be learned, and warn of what else is no fault of the model."""
        if before is None or self.resume_from is not None:
            return
        if reason := broken_tool(before.rollouts):
            raise UserCodeError(
                f"scoring before: {reason}. Fix the tool, or take it from the agent; if the calls are at fault, let it "
                "return the message as its result instead of raising"
            )
        for finding in evaluation_findings(before.rollouts, self.training.facts, "before"):
            if finding.kind in ENVIRONMENT_PROBLEMS:
                self.training.watcher.warn(str(finding))

    def _report_capability(self, before: EvalReport | None, groups: Sequence[Group]) -> None:
        """Show and record what the model can do before it is trained.

        pass@k is of the first step's groups, which the initial weights sampled. Those that were drawn again for a lack
        of signal do not count, nor groups that environments over the wire may have chosen by their rewards.
        """
        training = self.training
        rollouts = before.rollouts if before else [r for group in groups for r in group.rollouts]
        first = [] if training.facts.kind == "wire" else groups[: training.config.train.problems_per_step]
        capability = Capability.of(rollouts, [group.rollouts for group in first])
        training.watcher.note(str(capability))
        if training.ranks.is_first:
            self.folder.add_to_record(capability=capability.to_dict())

    def _evaluate_between(self, step: int) -> float:
        """Score the model, and note if its reward has clearly fallen: its interval lies below that of an earlier
        evaluation."""
        report = self._score(f"evaluating at step {step}")
        known = self.folder.eval_names()
        names = [name for name in known if name == "before" or (isinstance(name, int) and name < step)]
        earlier = [read_evaluation(self.folder.eval_file(name)) for name in names]
        best = max((found.reward for found in earlier if found), key=lambda reward: reward.value, default=None)
        self.training.held_out_fall = None
        if best is not None and report.reward.high < best.low:
            change = f"from {best.value:.3g} to {report.reward.value:.3g}"
            self.training.held_out_fall = f"the held-out reward fell {change}"
        if self.training.ranks.is_first:
            write_evaluation(self.folder.eval_file(step), report)
        self.training.tracker.metrics(step, {"eval/pass_rate": report.pass_rate.rate})
        return report.mean_reward

    def _score_stage(self) -> float | None:
        """The held-out pass rate between two stages; the best weights so far are kept."""
        if self.evaluator is None:
            return None
        step = self.training.state.step
        if not self._is_evaluated(step):
            self._evaluate_between(step)
        report = read_evaluation(self.folder.eval_file(step))
        if report is None:
            return None
        self.training.take_evaluation(report.mean_reward)
        return report.pass_rate.rate

    def _is_evaluated(self, step: int) -> bool:
        return any(row["step"] == step and "eval/pass_rate" in row for row in self.folder.metrics())


def score_of(report: EvalReport) -> tuple[float, float]:
    """Sort key for comparing models: the reward, then the pass rate."""
    return report.mean_reward, report.pass_rate.rate


def gpu_name(model: Any) -> str:
    """The name of the GPU that the model is on; empty for a CPU, or another machine."""
    is_here = model is not None and model.device.type == "cuda"
    return torch.cuda.get_device_name(model.device) if is_here else ""
