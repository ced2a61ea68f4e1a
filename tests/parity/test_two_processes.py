"""Learner and policy in two processes that share nothing but Weights: files in one folder, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forkserver import Forkserver

from palestra import demo
from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.api import train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.types import Sample, SamplingParams
from palestra.core.weights import Weights
from palestra.learner.local import LocalLearner
from palestra.models.loading import load_model
from palestra.policy.remote import RemotePolicy


@pytest.fixture
def server(forkserver: Forkserver, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A process that samples from palestra/tiny and takes weights from a folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    words = ("serve", "palestra/tiny", "--port", "0", "--weights-from", str(folder))
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    process = forkserver.popen("-m", "palestra", *words, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1].removesuffix("/v1"), folder
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.slow
def test_the_demo_is_learned_with_learner_and_policy_in_two_processes(server: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = server
    steps = {"train.max_steps": 3, "eval.cases": 30, "output_dir": str(tmp_path)}
    here = train_grpo(demo.agent, demo.suite, config=demo.config | steps, held_out=demo.held_out)
    blank = {name: torch.zeros_like(tensor) for name, tensor in load_model("palestra/tiny").model.named_parameters()}
    RemotePolicy(url, weights_folder=folder).update(Weights(9, lambda: blank))  # as an earlier run may have left it
    away = {"rollout.policy_url": url, "rollout.weights_folder": str(folder)}
    there = train_grpo(demo.agent, demo.suite, config=demo.config | steps | away, held_out=demo.held_out)
    assert there.before.pass_rate == here.before.pass_rate
    assert there.after.pass_rate.rate >= 0.9
    assert abs(there.after.pass_rate.rate - here.after.pass_rate.rate) <= 0.05
    assert there.metrics[0]["loss"] == pytest.approx(here.metrics[0]["loss"], abs=1e-4)
    assert max(row["staleness_max"] for row in there.metrics) == 0
    assert max(row["kl_sampler"] for row in there.metrics) < 1e-6  # the server has the learner's very weights
    assert list(folder.iterdir()) == []


def test_sampling_goes_on_from_version_v_while_gradients_for_the_next_accumulate(server: tuple[str, Path]) -> None:
    url, folder = server
    loaded = load_model("palestra/tiny")
    config = RunConfig.build({"rollout.temperature": 1.0})
    learner, policy = LocalLearner(loaded.model, config=config), RemotePolicy(url, weights_folder=folder)
    policy.update(learner.weights(version=3))
    prompt = loaded.tokenizer("What does a red lamp cost?").input_ids
    params = SamplingParams(24, seed=5)
    mask = [False] * 4 + [True] * 4
    sample = Sample([*prompt[:4], 7, 8, 9, 10], mask, [False] * 8, [0.0] * 8, 1.0)  # type: ignore[arg-type]
    rows = [sample, replace(sample, advantages=-0.5)]  # type: ignore[arg-type]
    loss = StepLoss.of(Batch.of(rows), Objective(), max_completion_length=16)

    async def turn() -> tuple[list[int], list[int]]:
        found = await policy.sample(policy.open(prompt), params)
        return found.token_ids.tolist(), found.versions.tolist()

    first = asyncio.run(turn())
    learner.forward_backward(Batch.of(rows[:1]), loss)
    assert asyncio.run(turn()) == first  # gradients gather, the policy samples what it sampled
    learner.forward_backward(Batch.of(rows[1:]), loss)
    learner.optim_step(0.05, max_grad_norm=1.0)
    assert asyncio.run(turn()) == first  # the learner has moved on, the policy is still at its version
    assert set(first[1]) == {3}
    policy.update(learner.weights(version=4))
    ids, versions = asyncio.run(turn())
    assert set(versions) == {4}
    assert ids != first[0]


def test_a_server_takes_weights_from_its_folder_alone(server: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = server
    policy = RemotePolicy(url, weights_folder=tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="is no file in"):
        policy.update(LocalLearner(load_model("palestra/tiny").model, config=RunConfig()).weights(1))


def test_weights_are_the_same_after_a_file(tmp_path: Path) -> None:
    weights = LocalLearner(load_model("palestra/tiny").model, config=RunConfig()).weights(7)
    read = Weights.load(weights.save(tmp_path / "weights.safetensors"))
    assert read.version == 7
    assert read.tensors().keys() == weights.tensors().keys()
    assert all(torch.equal(read.tensors()[name], tensor) for name, tensor in weights.tensors().items())
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]
