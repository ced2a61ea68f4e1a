"""Several ranks against one process: the same loss, gradients, weights and groups; checkpoints for any number."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from forkserver import Forkserver
from ranks_program import STEPS, apart, local, take_step, weights_of

PROGRAM = Path(__file__).with_name("ranks_program.py")
FAMILIES = ("experts", "hybrid")
SCENARIOS = ("full", "lora", *FAMILIES, "root", "shares", "unsendable", "stop", "killed", "stuck", "raises", "differ")


def run_ranks(forkserver: Forkserver, count: int, folder: Path, *scenarios: str) -> dict[str, Any]:
    """What each scenario gave in each rank, and how long it took."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with forkserver.popen(str(PROGRAM), str(count), str(folder), *scenarios, env=env) as process:
        assert process.wait(300) == 0
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in scenarios}


def write_checkpoints(folder: Path) -> None:
    """Of one process, with its weights after one more step."""
    for kind in ("full", "lora"):
        learner = local(kind)
        for step in range(STEPS):
            take_step(learner, step)
        (folder / f"{kind}-1").mkdir()
        learner.save(folder / f"{kind}-1")
        take_step(learner, STEPS)
        torch.save(weights_of(learner), folder / f"{kind}-1.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_checkpoints(path)
    return path


@pytest.fixture(scope="module")
def two(forkserver: Forkserver, folder: Path) -> dict[str, Any]:
    return run_ranks(forkserver, 2, folder, *SCENARIOS)


@pytest.fixture(scope="module")
def three(forkserver: Forkserver, two: dict[str, Any], folder: Path) -> dict[str, Any]:
    return run_ranks(forkserver, 3, folder, "full", "lora", "gated", "load", "shares", "killed")


def assert_parity(report: dict[str, Any]) -> None:
    for found in report["ranks"]:
        assert 0 < found["rows"] < 6
        assert found["logprobs"] < 1e-5  # float32 of about 5 nats
        assert found["loss"] < 1e-6
        assert found["gradient"] < 1e-6
        assert found["weights"] < 1e-5
        assert {name: apart for name, apart in found["metrics"].items() if apart > 1e-5} == {}
        assert {"loss", "norm", "entropy", "clip_ratio/low_mean", "echo_loss"} & found["metrics"].keys()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_ranks_find_the_loss_gradient_and_weights_of_one_process(two: dict[str, Any], kind: str) -> None:
    assert_parity(two[kind])


@pytest.mark.parametrize("kind", FAMILIES)
def test_two_ranks_train_hybrid_models_and_replay_experts_as_one_process_does(two: dict[str, Any], kind: str) -> None:
    assert_one_step(two[kind], kind)


def test_each_rank_computes_the_common_beginning_of_its_rows_once(two: dict[str, Any]) -> None:
    for found in two["root"]["ranks"]:
        assert set(found["roots"]) == {80}
        assert found["logprobs"] < 1e-5
        assert found["gradient"] < 1e-5


@pytest.mark.slow
def test_three_ranks_train_gated_delta_nets_with_experts(three: dict[str, Any]) -> None:
    assert_one_step(three["gated"], "gated")


def assert_one_step(report: dict[str, Any], kind: str) -> None:
    for found in report["ranks"]:
        assert 0 < found["rows"] < 6
        assert found["logprobs"] < 1e-4
        assert found["gradient"] < 1e-4
        assert {name: apart for name, apart in found["metrics"].items() if apart > 1e-4} == {}
        assert (found["mismatch"] is None) == (kind == "hybrid")
        assert kind == "hybrid" or found["mismatch"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_three_ranks_find_the_loss_gradient_and_weights_of_one_process(three: dict[str, Any], kind: str) -> None:
    assert_parity(three[kind])


@pytest.mark.slow
def test_low_precision_weights_keep_float32_masters_in_shards(forkserver: Forkserver, folder: Path) -> None:
    for found in run_ranks(forkserver, 2, folder, "low_precision")["low_precision"]["ranks"]:
        assert found["types"] == ["torch.bfloat16", "torch.float32"]
        assert found["tied"]
        assert found["share"] < 0.05  # of the way that the weights went: bfloat16 rounds gradients


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_one_process_goes_on_from_the_checkpoint_of_two_ranks(two: dict[str, Any], folder: Path, kind: str) -> None:
    learner = local(kind)
    learner.load(folder / f"{kind}-2")
    take_step(learner, STEPS)
    assert apart(torch.load(folder / f"{kind}-2.pt"), weights_of(learner)) < 1e-5


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_ranks_go_on_from_the_checkpoint_of_one_process(two: dict[str, Any], kind: str) -> None:
    assert max(found["from one process"] for found in two[kind]["ranks"]) < 1e-5


@pytest.mark.slow
def test_checkpoints_of_one_two_and_three_ranks_load_on_three_and_on_two(
    forkserver: Forkserver, three: dict[str, Any], folder: Path
) -> None:
    for found in (*three["load"]["ranks"], *run_ranks(forkserver, 2, folder, "load")["load"]["ranks"]):
        assert found.keys() == {f"{kind}-{count}" for kind in ("full", "lora") for count in (1, 2, 3)}
        assert max(found.values()) < 1e-5


def test_every_rank_gets_all_groups_in_the_order_and_with_the_seeds_of_one_process(two: dict[str, Any]) -> None:
    keys = [f"0/{i}" for i in range(5)]
    assert two["shares"]["ranks"] == [{"ids": list("01234"), "keys": keys, "whose": 2, "seen": 5}] * 2


def test_what_one_rank_cannot_send_is_named_on_every_rank(two: dict[str, Any]) -> None:
    for found in two["unsendable"]["ranks"]:
        value, group, work = found
        assert value.startswith("CodecError: rank 1: ['handle'] is a builtin_function_or_method, which cannot be sent")
        assert "rank 1: .groups[0].rollouts[0].info['handle'] is a builtin" in group
        assert "rank 0: [0]['handle'] is a builtin" in work


def test_a_request_to_stop_that_reaches_one_rank_stops_all_in_the_middle_of_their_rollouts(two: dict[str, Any]) -> None:
    assert two["stop"]["ranks"] == ["stopped", "stopped"]
    assert two["stop"]["seconds"] < 20


@pytest.mark.parametrize("scenario", ["killed", "stuck"])
def test_a_rank_that_is_killed_ends_the_others_with_the_reason(
    two: dict[str, Any], folder: Path, scenario: str
) -> None:
    first, last = two[scenario]["ranks"]
    reason = (folder / "stuck-0.txt").read_text() if scenario == "stuck" else first
    assert reason.startswith("rank 1 (process ")
    assert "ended without a word" in reason
    assert last is None
    assert two[scenario]["seconds"] < 20


def test_the_failure_of_one_rank_is_the_failure_of_all(two: dict[str, Any]) -> None:
    first, last = two["raises"]["ranks"]
    assert first == "rank 1: the disk is full"
    assert last == "the disk is full"


def test_ranks_with_other_settings_are_refused_by_name(two: dict[str, Any]) -> None:
    for found in two["differ"]["ranks"]:
        assert "seed" in found
        assert "start all ranks with the same command" in found
