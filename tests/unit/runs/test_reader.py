"""A run's numbers and reasons come from its files, however they were left."""

import json
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.limits import count_gpus, default_max_runs, demand_of, free_memory_gib, gpu_names
from palestra.runs.reader import Run, merge_last_step, progress, results, sample, tail, why_it_ended


def write_metrics(folder: Path, rows: list[dict[str, float]], rest: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)


def test_progress_is_the_newest_of_each_number_and_skips_a_half_written_line(tmp_path):
    rows = [{"step": i, "reward_mean": i / 10, "pass_rate": 0.5, "loss": -0.1} for i in range(1, 5)]
    write_metrics(tmp_path, [*rows, {"step": 4, "eval/pass_rate": 0.75}], '{"step": 5, "rew')
    assert progress(RunFolder(tmp_path)) == {
        "step": 4, "reward_mean": 0.4, "percent_correct": 0.5, "loss": -0.1, "eval_percent_correct": 0.75,
    }  # fmt: skip


def test_progress_of_a_run_that_has_done_nothing_is_empty(tmp_path):
    assert progress(RunFolder(tmp_path)) == {}


def test_the_report_says_how_many_held_out_cases_pass_in_the_end(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"after": {"pass_rate": {"rate": 0.9}}, "before": {}}))
    assert progress(RunFolder(tmp_path))["eval_percent_correct"] == 0.9


def test_a_long_history_is_sampled_from_end_to_end():
    rows = [{"step": float(i)} for i in range(1, 1001)]
    some = sample(rows, 50)
    assert len(some) == 50
    assert (some[0], some[-1]) == (rows[0], rows[-1])
    assert sample(rows[:7], 50) == rows[:7]


def test_results_of_a_long_run_hold_fifty_rows_of_its_history(tmp_path):
    rows = [{"step": i, "loss": i / 100} for i in range(1, 53)]
    write_metrics(tmp_path, rows)
    times = {"created": 0.0, "started": 1.0, "ended": 2.0}
    empty = {"processes": {}, "logs": {}, "ports": {}, "progress": {}}
    known = {"run_id": "r1234567", "name": "long", "environment": "demo", "state": "completed", "reason": None}
    found = results(Run(**known, folder=tmp_path, **times, **empty))
    assert len(found["history"]) == 50
    assert (found["history"][0], found["final_metrics"]) == (rows[0], rows[-1])


def test_an_evaluations_row_is_merged_into_its_step():
    rows = [{"step": 3, "loss": 1.0}, {"step": 4, "loss": 2.0}, {"step": 4, "eval/pass_rate": 0.5}]
    assert merge_last_step(rows) == {"step": 4, "loss": 2.0, "eval/pass_rate": 0.5}


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (
            2,
            "loading …\nError: there is no model 'x'. Use palestra/tiny\n",
            "code 2:\nError: there is no model 'x'. Use palestra/tiny",
        ),
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
    on_cpu = demand_of(RunConfig.build({"model.name": str(tmp_path)}).model, machine_gpus=0, processes=1)
    assert (on_cpu.gpus, round(on_cpu.memory_gib, 3)) == (0, 1.005)
    assert demand_of(RunConfig.build({}).model, machine_gpus=2, processes=3).gpus == 1
    assert demand_of(RunConfig.build({"model.device": "cpu"}).model, machine_gpus=2, processes=1).gpus == 0
    assert demand_of(RunConfig.build({"model.gpus": 2}).model, machine_gpus=2, processes=1).gpus == 2
    assert demand_of(RunConfig.build({}).model, machine_gpus=4, processes=1, ranks=3).gpus == 3
    assert demand_of(RunConfig.build({}).model, machine_gpus=0, processes=1, ranks=3).memory_gib == 3
    with pytest.raises(PalestraError, match="--nproc 3 needs a GPU for each process, and there are 2; use --nproc 2"):
        demand_of(RunConfig.build({}).model, machine_gpus=2, processes=1, ranks=3)


@pytest.mark.parametrize(("machine_gpus", "said"), [(2, "there are 2 GPUs here"), (0, "there is no GPU here")])
def test_more_gpus_than_the_machine_has_are_refused(machine_gpus, said):
    with pytest.raises(PalestraError, match=rf"model\.gpus = 3: {said}"):
        demand_of(RunConfig.build({"model.gpus": 3}).model, machine_gpus, processes=1)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_gpus_of_any_number_and_a_device_by_its_name_exclude_each_other(device):
    with pytest.raises(PalestraError, match=f"model.device = {device} for another device; leave one of them out"):
        demand_of(RunConfig.build({"model.gpus": 1, "model.device": device}).model, machine_gpus=2, processes=1)


def test_the_gpus_that_runs_may_be_given_can_be_named(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PALESTRA_GPUS", "0, 1,GPU-7f")
    assert gpu_names() == ["0", "1", "GPU-7f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7f,9")  # in the process of a run
    assert gpu_names() == ["GPU-7f"]


def test_the_limit_of_runs_can_be_set(monkeypatch):
    monkeypatch.setenv("PALESTRA_MAX_RUNS", "7")
    assert default_max_runs() == 7
    monkeypatch.setenv("PALESTRA_MAX_RUNS", "many")
    assert default_max_runs() >= 1
    assert free_memory_gib() > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0
