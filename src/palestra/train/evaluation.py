"""Scoring during a run: held-out problems before, during and after training, with every rollout on disk."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palestra.core.config import RunConfig
from palestra.core.files import read_jsonl, write_jsonl
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import HELD_OUT_PREFIX, Problem
from palestra.envs.base import Split
from palestra.evals.report import EvalReport
from palestra.rollout.collect import GroupCollector
from palestra.rollout.evaluate import EvalFile, evaluate
from palestra.train.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What is scored, and how it is sampled."""

    collector: GroupCollector
    problems: Sequence[Problem]
    config: RunConfig
    split: Split = "held_out"

    def run(self, runner: asyncio.Runner, watcher: Watcher, phase: str, file: EvalFile | None = None) -> EvalReport:
        """Score the problems as `config.eval` says, and report each rollout to the watcher.

        Attempts are kept in `file`, which may hold some already.
        """
        options = self.config.eval
        problems = self.problems[: options.cases]
        watcher.phase(phase, len(problems) * options.samples_per_case)
        done = itertools.count(1)
        report = runner.run(
            evaluate(
                self.collector,
                problems,
                samples_per_case=options.samples_per_case,
                seed=self.config.seed,
                on_rollout=lambda rollout: watcher.advance(next(done), {}),
                file=file,
            )
        )
        return replace(report, split=self.split)


def write_evaluation(path: Path, report: EvalReport) -> None:
    """One line a rollout, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    write_jsonl(path, (rollout_to_dict(rollout) for rollout in report.rollouts))


def read_evaluation(path: Path, split: Split = "held_out", problems: Sequence[Problem] = ()) -> EvalReport | None:
    """What `write_evaluation` wrote; None where there is none.

    It was of these problems: their ids get the prefix that an older version did not write.
    """
    rollouts = [rollout_from_dict(row) for row in read_jsonl(path)] if path.is_file() else []
    if problems and problems[0].id != problems[0].own_id:
        rollouts = [
            replace(r, problem_id=HELD_OUT_PREFIX + r.problem_id.removeprefix(HELD_OUT_PREFIX)) for r in rollouts
        ]
    seconds = max((rollout.seconds for rollout in rollouts), default=0.0)
    return EvalReport.of(rollouts, seconds, split) if rollouts else None
