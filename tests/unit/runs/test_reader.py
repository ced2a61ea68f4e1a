"""A run's numbers and reasons come from its files, however they were left."""

import json
import os
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.limits import Places, count_gpus, default_max_runs, gpu_names, gpus_needed
from palestra.runs.reader import Run, merge_last_step, progress, results, sample, tail, why_it_ended


def write_metrics(folder: Path, rows: list[dict[str, float]], rest: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)


def demand(settings: dict[str, object], machine_gpus: int, ranks: int = 1) -> int:
    return gpus_needed(RunConfig.build(settings).model, machine_gpus, ranks)


def test_progress_is_the_newest_of_each_number_and_skips_a_half_written_line(tmp_path):
    rows = [{"step": i, "reward_mean": i / 10, "pass_rate": 0.5, "loss": -0.1} for i in range(1, 5)]
    write_metrics(tmp_path, [*rows, {"step": 4, "eval/pass_rate": 0.75}], '{"step": 5, "rew')
    assert progress(RunFolder(tmp_path)) == {
        "step": 4, "reward_mean": 0.4, "percent_correct": 0.5, "loss": -0.1, "eval_percent_correct": 0.75,
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps({"after": {"pass_rate": {"rate": 0.9}}, "before": {}}))
    assert progress(RunFolder(tmp_path))["eval_percent_correct"] == 0.9, "the report has the last word"
    assert progress(RunFolder(tmp_path / "empty")) == {}


def test_results_of_a_long_run_hold_fifty_rows_of_its_history_from_end_to_end(tmp_path):
    rows = [{"step": i, "loss": i / 100} for i in range(1, 53)]
    write_metrics(tmp_path, rows)
    times = {"created": 0.0, "started": 1.0, "ended": 2.0}
    empty = {"processes": {}, "logs": {}, "ports": {}, "progress": {}}
    known = {"run_id": "r1234567", "name": "long", "environment": "demo", "state": "completed", "reason": None}
    found = results(Run(**known, folder=tmp_path, **times, **empty))
    assert len(found["history"]) == 50
    assert (found["history"][0], found["history"][-1], found["final_metrics"]) == (rows[0], rows[-1], rows[-1])
    assert sample(rows[:7], 50) == rows[:7]


def test_an_evaluations_row_is_merged_into_its_step():
    rows = [{"step": 3, "loss": 1.0}, {"step": 4, "loss": 2.0}, {"step": 4, "eval/pass_rate": 0.5}]
    assert merge_last_step(rows) == {"step": 4, "loss": 2.0, "eval/pass_rate": 0.5}


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (2, "loading …\nError: there is no model 'x'. Use it\n", "code 2:\nError: there is no model 'x'. Use it"),
        (1, "Traceback (most recent call last):\n  File x\nValueError: bad\n", "exit code 1:\nValueError: bad"),
        (3, "one\ntwo\n\nthree\nfour\n", "exit code 3:\ntwo\nthree\nfour"),
        (-9, "Error: an old one\n", "the trainer was killed by SIGKILL; perhaps out of memory"),
        (-11, "", "the trainer was killed by SIGSEGV"),
        (1, "", "the trainer ended with exit code 1"),
    ],
)
def test_the_reason_of_an_end_is_what_its_log_says_last(tmp_path, code, log, said):
    (tmp_path / "log").write_text(log)
    assert why_it_ended("trainer", code, tmp_path / "log").endswith(said)


def test_a_missing_package_is_named_with_the_option_that_installs_it_where_there_is_one(tmp_path):
    (tmp_path / "log").write_text("Traceback\nModuleNotFoundError: No module named 'bs4'\n")
    assert why_it_ended("env", 1, tmp_path / "log", packages=True).endswith("add: --with beautifulsoup4")
    assert "--with" not in why_it_ended("env", 1, tmp_path / "log")


def test_logs_are_shown_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    (tmp_path / "log").write_text("a\nlogged in with 0123456789abcdef\n")
    assert tail(tmp_path / "log", 1) == ["logged in with [WANDB_API_KEY]"]
    assert tail(tmp_path / "none", 5) == []


def test_a_run_needs_the_gpus_of_its_settings_or_one_per_rank():
    assert demand({}, 0) == demand({"model.device": "cpu"}, 2) == 0
    assert demand({}, 2) == 1
    assert demand({"model.gpus": 2}, 2) == 2
    assert demand({}, 4, ranks=3) == 3


class Queue:
    """Runs that wait for places, in the order of their names."""

    def __init__(self, home: Path, gpus: dict[str, int]) -> None:
        launches = enumerate(gpus.items())
        self.places = {name: Places(home, name, float(number), count) for number, (name, count) in launches}

    def take(self, name: str) -> str | None:
        return self.places[name].take()

    def end(self, name: str) -> None:
        for lock in self.places[name].locks:
            os.close(lock)


def test_runs_wait_for_places_in_the_order_of_their_coming(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_MAX_RUNS", "1")
    queue = Queue(tmp_path, dict.fromkeys("abc", 0))
    assert queue.take("a") is None
    assert [queue.take(name) for name in "bc"] == ["1 of at most 1 runs are running"] * 2
    queue.end("a")
    assert queue.take("c") == "run b is before it"
    assert queue.take("b") is None


def test_a_run_gets_as_many_gpus_as_it_asks_for_and_waits_until_they_are_free(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_MAX_RUNS", "9")
    monkeypatch.setenv("PALESTRA_GPUS", "0,GPU-7f,MIG-GPU-7f/1/0,3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    queue = Queue(tmp_path, {"a": 1, "b": 2, "c": 2, "cpu": 0, "d": 1})
    assert [queue.take(name) for name in "ab"] == [None, None]
    assert queue.take("c") == "3 of 4 GPUs are in use"
    assert queue.take("d") == "run c is before it"  # it would fit: but then c might wait for ever
    assert queue.take("cpu") is None
    queue.end("a")
    assert queue.take("c") is None
    assert {name: queue.places[name].devices for name in ("a", "b", "c", "cpu")} == {
        "a": ["0"], "b": ["GPU-7f", "MIG-GPU-7f/1/0"], "c": ["0", "3"], "cpu": [],
    }  # fmt: skip
    assert queue.take("d") == "4 of 4 GPUs are in use"


def test_no_two_runs_have_the_same_port(tmp_path):
    queue = Queue(tmp_path, dict.fromkeys("ab", 0))
    assert [queue.places[name].lock("port-20000") for name in "ab"] == [True, False]
    queue.end("a")
    assert queue.places["b"].lock("port-20000")


@pytest.mark.parametrize(
    ("settings", "machine_gpus", "ranks", "said"),
    [
        ({}, 2, 3, "--nproc 3 needs a GPU for each process, and there are 2; use --nproc 2"),
        ({"model.gpus": 3}, 2, 1, r"model\.gpus = 3: there are 2 GPUs here"),
        ({"model.gpus": 3}, 0, 1, r"model\.gpus = 3: there is no GPU here"),
        (
            {"model.gpus": 1, "model.device": "cpu"},
            2,
            1,
            "model.device = cpu for another device; leave one of them out",
        ),
        ({"model.gpus": 1, "model.device": "cuda:1"}, 2, 1, "model.device = cuda:1 for another device"),
    ],
)
def test_a_demand_that_can_never_be_met_is_refused(settings, machine_gpus, ranks, said):
    with pytest.raises(PalestraError, match=said):
        demand(settings, machine_gpus, ranks)


def test_the_gpus_that_runs_may_be_given_and_the_number_of_runs_can_be_set(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PALESTRA_GPUS", "0, 1,GPU-7f")
    assert gpu_names() == ["0", "1", "GPU-7f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7f,9")  # in the process of a run
    assert gpu_names() == ["GPU-7f"]
    monkeypatch.setenv("PALESTRA_MAX_RUNS", "7")
    assert default_max_runs() == 7
    monkeypatch.setenv("PALESTRA_MAX_RUNS", "many")
    assert default_max_runs() >= 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0
