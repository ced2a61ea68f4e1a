"""A run's numbers and reasons come from its files, however they were left."""

import json
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.limits import Demand, count_gpus, default_max_runs, demand_of, free_memory_gib, gpu_names
from palestra.runs.reader import Run, merge_last_step, progress, results, sample, tail, why_it_ended


def write_metrics(folder: Path, rows: list[dict[str, float]], rest: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)


def demand(settings: dict[str, object], machine_gpus: int, ranks: int = 1) -> Demand:
    return demand_of(RunConfig.build(settings).model, machine_gpus, 1, ranks)


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


def test_demand_knows_gpus_and_the_size_of_local_models(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 2**20)
    on_cpu = demand({"model.name": str(tmp_path)}, 0)
    assert (on_cpu.gpus, round(on_cpu.memory_gib, 3)) == (0, 1.005)
    assert demand({}, 2).gpus == 1
    assert demand({"model.device": "cpu"}, 2).gpus == 0
    assert demand({"model.gpus": 2}, 2).gpus == 2
    assert demand({}, 4, ranks=3).gpus == 3
    assert demand({}, 0, ranks=3).memory_gib == 3


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
    assert free_memory_gib() > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0
