"""Scoring in the course of a run: held-out problems before, between and after, with every rollout on disk."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.core.config import RunConfig
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Problem
from palestra.evals.report import EvalReport
from palestra.rollout.evaluate import CollectsGroups, evaluate
from palestra.train.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What is scored, and how it is sampled."""

    collector: CollectsGroups
    problems: Sequence[Problem]
    config: RunConfig

    def run(self, runner: asyncio.Runner, watcher: Watcher, phase: str) -> EvalReport:
        """Score the problems as `config.eval` says, telling the watcher of each rollout."""
        options = self.config.eval
        problems = self.problems[: options.cases]
        watcher.phase(phase, len(problems) * options.samples_per_case)
        done = itertools.count(1)
        return runner.run(
            evaluate(
                self.collector,
                problems,
                samples_per_case=options.samples_per_case,
                seed=self.config.seed,
                on_rollout=lambda rollout: watcher.advance(next(done), {}),
            )
        )


def write_evaluation(path: Path, report: EvalReport) -> None:
    """One line a rollout, behind a line with the evaluation's own numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"seconds": report.seconds, "rollouts": len(report.rollouts)}) + "\n")
        for rollout in report.rollouts:
            file.write(json.dumps(rollout_to_dict(rollout), ensure_ascii=False, default=str) + "\n")
    aside.rename(path)


def read_evaluation(path: Path) -> EvalReport | None:
    """What `write_evaluation` wrote; None where there is none."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        seconds = json.loads(file.readline())["seconds"]
        return EvalReport.of([rollout_from_dict(json.loads(line)) for line in file], seconds=seconds)
