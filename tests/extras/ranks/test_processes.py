"""What several ranks refuse, and how rows are divided among them. tests/extras/ranks/test_parity.py has real ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from palestra.algo.batch import Batch
from palestra.cli.train import starts_ranks
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, ResourceError, SettingError
from palestra.core.ranks import Ranks, RankVariables
from palestra.core.types import Sample
from palestra.envs.discover import load_env
from palestra.extras.ranks.learner import share_of_rows
from palestra.extras.ranks.processes import rank_device
from palestra.train.tasks import EnvironmentTask, FinishTask, require_ranks_support

PLACE = RankVariables(rank=1, size=4, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"backend": "tinker"}, "backend = 'tinker'"),
        ({"vllm.mode": "colocate"}, "vllm.mode = 'colocate'"),
        ({"vllm.mode": "server"}, "vllm.mode = 'server'"),
        ({"rollout.policy_url": "http://x"}, "rollout.policy_url"),
        ({"rollout.max_staleness": 2}, "rollout.max_staleness = 2"),
        ({"lora.load_in_4bit": True}, "lora.load_in_4bit"),
    ],
)
def test_settings_that_ranks_cannot_heed_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    task = EnvironmentTask(load_env("calculator", {}))
    require_ranks_support(RunConfig(), task, None)
    with pytest.raises(SettingError, match=named):
        require_ranks_support(RunConfig.build(settings), task, None)


def test_groups_that_come_to_one_process_are_refused_over_ranks() -> None:
    task = EnvironmentTask(load_env("calculator", {}))
    function = replace(task, rollout_func=lambda *_: [])
    for wrong, own, words in (
        (function, None, r"a rollout_func gives its groups to one process.*without --nproc"),
        (FinishTask(None), None, "a FinishTask gives its groups to one process"),
        (task, object(), "a learner or a policy of your own"),
    ):
        with pytest.raises(PalestraError, match=words):
            require_ranks_support(RunConfig(), wrong, own)


def test_more_ranks_than_gpus_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ResourceError, match=r"4 ranks .* need as many GPUs, and there are 2; use --nproc 2"):
        rank_device(PLACE, RunConfig())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert rank_device(PLACE, RunConfig()) == torch.device("cuda", 1)
    assert rank_device(PLACE, RunConfig.build({"model.device": "cpu"})) == torch.device("cpu")
    with pytest.raises(SettingError, match=r"model.device = 'cuda:0' is one GPU"):
        rank_device(PLACE, RunConfig.build({"model.device": "cuda:0"}))


def test_only_a_process_that_is_no_rank_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts_ranks(2, refused={"--env-url": None})
    assert not starts_ranks(1, refused={"--env-url": "http://x"})
    with pytest.raises(SettingError, match=r"--nproc 2 .*; leave out --nproc, or --env-url"):
        starts_ranks(2, refused={"--env-url": "http://x"})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not starts_ranks(2, refused={})
    with pytest.raises(SettingError, match=r"torchrun has started 2 ranks here; leave --nproc out"):
        starts_ranks(3, refused={})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rows_are_divided_in_runs_with_about_the_same_tokens(size: int) -> None:
    lengths = [40, 10, 10, 10, 10, 80, 20, 20, 30, 10]
    samples = [Sample([1] * n, [True] * n, [False] * n, [0.0] * n, 1.0) for n in lengths]  # type: ignore[arg-type]
    shares = [slice(*share_of_rows(Batch.of(samples), Ranks(rank, size))) for rank in range(size)]
    assert [i for share in shares for i in range(len(samples))[share]] == list(range(len(samples)))
    tokens = [sum(lengths[share]) for share in shares]
    assert max(tokens) <= sum(lengths) / size + max(lengths)
    alone = [share_of_rows(Batch.of(samples[:1]), Ranks(rank, size)) for rank in range(size)]
    assert [last - first for first, last in alone].count(1) == 1, "other ranks have an empty share"
