"""Worker processes of the agent loop: the same rollouts as in one process, and clear errors when one ends."""

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedPolicy
from worker_runs import Sums, WorkerRun, is_alive, pids, tokens

from palestra.core.chat_model import ChatModel
from palestra.core.config import RunConfig
from palestra.core.errors import ResourceError, SettingError
from palestra.core.types import Group
from palestra.envs.running import RunningEnv
from palestra.extras.environments.calculator import Calculator
from palestra.policy.local import LocalPolicy
from palestra.train import tasks
from palestra.train.tasks import EnvironmentTask, Parts, worker_count
from palestra.train.watcher import Watcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rollout.workers forks processes")


@pytest.fixture
def start(tiny: Any) -> Iterator[Any]:
    runs: list[WorkerRun] = []

    def make(environment: Any = None, *more: Any, **settings: Any) -> WorkerRun:
        runs.append(WorkerRun(environment or RunningEnv(Sums()), tiny, *more, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
        run.parts.runner.close()


def test_rollouts_are_those_of_one_process_prepared_or_not(start):
    here, there = start(rollout__workers=0), start()
    expected = [here.step() for _ in range(3)]
    found = [there.step()]
    there.prepare()
    found.append(there.step())
    there.prepare(4)  # of other groups than those that come: they are given up
    found.append(there.step())
    assert [tokens(groups) for groups in found] == [tokens(groups) for groups in expected]
    for mine, other in zip(found, expected, strict=True):
        assert [g.problem_id for g in mine] == [g.problem_id for g in other]
        assert [[r.messages for r in g.rollouts] for g in mine] == [[r.messages for r in g.rollouts] for g in other]
    assert here.pids == []
    workers = [f"process {pid}" for pid in there.pids]
    assert [found[0][i].rollouts[0].scores["score"].reason for i in range(5)] == [workers[i % 2] for i in range(5)]
    assert all(len(of_group) == 1 for of_group in pids(found[0])), "a group belongs to one worker"


def test_an_evaluation_is_made_by_workers_too(start):
    here, there = start(rollout__workers=0, eval__cases=4), start(eval__cases=4)
    reports = [run.evaluator.run(run.parts.runner, run.parts.watcher, "scoring") for run in (here, there)]
    assert tokens([Group("", report.rollouts) for report in reports][:1]) == tokens([Group("", reports[1].rollouts)])


def test_workers_end_with_the_source(start):
    run = start()
    run.step(2)
    assert len(run.pids) == 2
    assert all(map(is_alive, run.pids))
    run.close()
    assert not any(map(is_alive, run.pids))


class Gated(Sums):
    """Its attempts begin when the file exists; each says in which process."""

    folder: Path

    def start(self) -> None:
        (self.folder / str(os.getpid())).touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)


def test_groups_of_a_worker_that_is_killed_are_collected_again_by_the_others_with_the_same_keys(start, tmp_path):
    expected = start(rollout__workers=0).step()
    environment = Gated()
    environment.folder = tmp_path
    (tmp_path / "go").touch()
    run = start(RunningEnv(environment), rollout__workers=3)  # its first episode opens in this process
    (tmp_path / "go").unlink()
    killed = run.pids[1]

    async def killing() -> list[Group]:
        step = asyncio.create_task(run.source.next(5, 0))
        while not (tmp_path / str(killed)).exists():
            await asyncio.sleep(0.01)
        os.kill(killed, signal.SIGKILL)
        await asyncio.sleep(0.1)
        (tmp_path / "go").touch()
        return await step

    found = run.parts.runner.run(killing())
    assert tokens(found) == tokens(expected)
    assert f"process {killed}" not in {reason for of_group in pids(found) for reason in of_group}
    assert all(len(of_group) == 1 for of_group in pids(found))
    run.prepare()
    assert len(run.step()) == 5
    assert not run.policy.engine.busy


def test_when_all_workers_were_killed_the_step_ends_with_the_reason(start):
    run = start()
    run.step(2)
    for pid in run.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match=r"SIGKILL.*rollout.workers"):
        run.step()
    with pytest.raises(ResourceError):
        run.step()
    assert not run.policy.engine.busy, "no turn is left"


class Slow(Sums):
    """Its tool waits until the file exists."""

    file: Path

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def start(self) -> None:
        while not self.file.exists():
            time.sleep(0.01)


def test_a_cancelled_step_leaves_workers_that_go_on(start, tmp_path):
    environment = Slow()
    environment.file = tmp_path / "go"
    environment.file.touch()
    run = start(RunningEnv(environment))
    environment.file.unlink()

    async def cancelled() -> None:
        task = asyncio.create_task(run.source.next(4, 0))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run.parts.runner.run(cancelled())
    environment.file.touch()
    assert len(run.step(2)) == 2


class Broken(Sums):
    def score(self, answer: str) -> Any:
        raise KeyError("no such thing")

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        logging.getLogger("palestra.test").warning("adding in another process")
        return a + b


def test_errors_of_the_environment_are_on_the_rollouts(start):
    errors = {r.error for g in start(RunningEnv(Broken())).step(2) for r in g.rollouts}
    assert len(errors) == 1
    assert "KeyError" in errors.pop()


def test_a_prompt_that_is_refused_fails_its_group_alone(start):
    class Long(Sums):
        def make_problem(self, rng: random.Random) -> Any:
            a = rng.randint(1, 99)
            return f"What is {a} + 1?" + " again" * (a % 2 * 5000), a + 1

    groups = start(RunningEnv(Long())).step(6)
    errors = [{r.error for r in g.rollouts} for g in groups]
    assert {None} in errors
    assert any("tokens" in str(error) for of_group in errors for error in of_group)


def test_reward_functions_know_how_far_the_training_is(start):
    def progress(completions: list, trainer_state: Any) -> list[float]:
        return [float(trainer_state.global_step)] * len(completions)

    for workers in (0, 2):
        run = start(None, [progress], rollout__workers=workers)
        run.step(2)
        run.policy.engine.weights_changed(7)
        assert {r.scores["progress"].value for g in run.step(2) for r in g.rollouts} == {7.0}


def test_log_records_of_workers_reach_this_process(start, caplog):
    class Chatty(Sums):
        def start(self) -> None:
            logging.getLogger("palestra.test").warning("hello from %d", os.getpid())

    run = start(RunningEnv(Chatty()))
    run.step(2)
    assert {record.getMessage() for record in caplog.records} >= {f"hello from {pid}" for pid in run.pids}


def test_models_of_this_process_are_not_loaded_in_a_worker(start, caplog):
    async def judged(completions: list, **more: Any) -> list[float]:
        await ChatModel("palestra/tiny", purpose="judge").ask([{"role": "user", "content": "?"}], str)
        return [1.0] * len(completions)

    start(None, [judged]).step(2)
    assert any("rollout.workers" in record.getMessage() for record in caplog.records)


class Limited(Sums):
    max_episodes = 4


def test_workers_are_rejected_where_they_cannot_work(start, monkeypatch):
    config = RunConfig.build({"rollout.workers": 2})
    with pytest.raises(SettingError, match="limits"):
        worker_count(RunningEnv(Limited()), config)
    served = {"rollout.policy_url": "http://127.0.0.1:9", "rollout.weights_folder": "weights"}
    with pytest.raises(SettingError, match="paged engine"):
        worker_count(RunningEnv(Sums()), config.with_settings(served))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(SettingError, match="has used the GPU already"):
        worker_count(RunningEnv(Sums()), config)
    monkeypatch.setattr(tasks, "CAN_FORK", False)
    with pytest.raises(SettingError, match="cannot fork"):
        worker_count(RunningEnv(Sums()), config)


def test_workers_that_the_policy_cannot_have_end(tiny_tokenizer):
    """An error if they were asked for: the model has no paged engine, which is known when it is loaded."""
    task = EnvironmentTask(RunningEnv(Sums()))
    config = RunConfig.build({"rollout.workers": 2})
    task.start_workers(config)
    ids = task.workers.process_ids
    parts = Parts(config, ScriptedPolicy(tiny_tokenizer, []), tiny_tokenizer, None, None)
    with pytest.raises(SettingError, match="paged engine"):
        task.source(parts)
    assert not any(map(is_alive, ids))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(tasks, "processors", lambda: 6)


def test_workers_are_chosen_with_a_gpu_for_environments_that_say_so(gpu, monkeypatch):
    for processors, count in ((4, 0), (6, 3), (64, 8)):
        monkeypatch.setattr(tasks, "processors", lambda processors=processors: processors)
        assert worker_count(RunningEnv(Calculator()), RunConfig.build()) == count
    assert worker_count(RunningEnv(Sums()), RunConfig.build()) == 0
    assert worker_count(RunningEnv(Calculator()), RunConfig.build({"model.device": "cpu"})) == 0


@pytest.mark.parametrize("cause", ["torch.cuda.is_initialized", "palestra.train.tasks.CAN_FORK"])
def test_one_sentence_says_why_a_run_that_chooses_workers_has_none(gpu, monkeypatch, caplog, tiny, cause):
    monkeypatch.setattr(cause, (lambda: True) if "cuda" in cause else False)
    task = EnvironmentTask(RunningEnv(Calculator()))
    for _ in range(2):  # before the model is loaded, and when the run is built
        task.start_workers(RunConfig.build())
    assert task.workers is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("rollouts run in this process")


def test_workers_that_a_run_has_chosen_end_where_the_engine_overlaps_nothing(gpu, tiny):
    policy = LocalPolicy(tiny.model, tiny.tokenizer, kv_memory_gib=0.05, self_check=False)
    task, config = EnvironmentTask(RunningEnv(Calculator())), RunConfig.build({"rollout.group_size": 2})
    task.start_workers(config)
    ids = task.workers.process_ids
    assert len(ids) == 3
    with asyncio.Runner() as runner:
        task.source(Parts(config, policy, tiny.tokenizer, runner, Watcher()))
    assert task.workers is None
    assert not any(map(is_alive, ids))
