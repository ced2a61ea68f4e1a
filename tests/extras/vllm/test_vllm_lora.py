"""LoRA with a running vLLM: each version of the adapter is one of its own there, and goes when it is not needed."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_vllm import random_model
from test_vllm_server import turn

from palestra.core.config_sections import LoraSection
from palestra.core.errors import ServiceError, StorageError, UnsupportedError
from palestra.core.types import SamplingParams
from palestra.core.weights import Weights
from palestra.extras.ray.pool import GroupSampler, PackedWeights, RolloutPool
from palestra.extras.vllm.common import Adapter, AdapterFolders
from palestra.extras.vllm.open import save_base
from palestra.learner.lora import add_lora

RANK = 2


def adapted(seed: int, rank: int = RANK) -> Any:
    """Base 0 with an adapter that changes what it says."""
    model = add_lora(random_model(0), LoraSection(r=rank))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    return model.eval()


def weights_of(model: Any, version: int) -> Weights:
    return Weights(version, dict, model)


def test_each_version_is_an_adapter_of_its_own_and_requests_name_the_last(fake, connect):
    sampler = connect(lora_rank=RANK)
    for version in range(4):
        sampler.update(weights_of(adapted(version), version))  # its logprobs are compared inside
        assert turn(sampler, SamplingParams(4, seed=1), [5, 6]).versions.tolist() == [version] * 4
    loaded = [call.removeprefix("load ") for call in fake.calls if call.startswith("load ")]
    assert len(set(loaded)) == 4, "vLLM's prefix cache goes by the name: none may come twice"
    assert list(fake.adapters or ()) == loaded[-2:]  # the one before may have a request that was just given up
    assert not any(call.startswith(("pause", "palestra_", "reset")) for call in fake.calls)


def test_versions_that_requests_may_be_under_way_for_stay_loaded(fake, connect, tmp_path):
    sampler, model = connect(lora_rank=RANK, max_staleness=2), adapted(1)
    for version in range(5):
        sampler.update(weights_of(model, version))
    assert [name.rpartition("-v")[2] for name in fake.adapters or ()] == ["1", "2", "3", "4"]
    assert len(list(tmp_path.glob("*/*/adapter_model.safetensors"))) == 4


def test_a_turn_that_a_newer_adapter_overtakes_is_of_its_own_version(fake, connect):
    sampler = connect(lora_rank=RANK, max_staleness=1)
    sampler.update(weights_of(adapted(0), 0))
    first = sampler.served_model

    async def overtaken() -> Any:
        under_way = asyncio.create_task(sampler.sample(sampler.open([5, 6]), SamplingParams(8, seed=3)))
        await asyncio.sleep(0)  # it has been asked for
        await asyncio.to_thread(sampler.update, weights_of(adapted(1), 1))
        return await under_way

    sampled = asyncio.run(overtaken())
    assert sampled.versions.tolist() == [0] * 8
    assert fake.adapters is not None
    again = fake.adapters[first]
    same = asyncio.run(again.sample(again.open([5, 6]), SamplingParams(8, seed=3)))
    assert sampled.token_ids.tolist() == same.token_ids.tolist()


def test_the_end_of_a_run_leaves_nothing_at_the_server_and_on_disk(fake, connect, tmp_path):
    sampler = connect(lora_rank=RANK)
    sampler.update(weights_of(adapted(0), 0))
    other = connect(lora_rank=RANK)
    other.update(weights_of(adapted(0), 0))
    assert sampler.served_model != other.served_model, "two runs at one server never share a name"
    for each in (sampler, other):
        each.release()
    assert fake.adapters == {}
    del sampler, other, each
    assert list(tmp_path.iterdir()) == []


def test_the_server_of_another_user_can_read_what_the_umask_allows(tmp_path):
    (tmp_path / "other").touch()
    folders = AdapterFolders(tmp_path)
    written = list(folders.write(weights_of(adapted(0), 0)).folder.glob("adapter*"))
    written.append(Weights(0, lambda: {"w": torch.zeros(1)}).save(tmp_path / "whole.safetensors"))
    assert [path.stat().st_mode for path in written] == [(tmp_path / "other").stat().st_mode] * 3


def test_another_base_model_is_found_out_though_its_adapter_is_loaded(connect):
    other = add_lora(random_model(1), LoraSection(r=RANK)).eval()
    with pytest.raises(ServiceError, match=r"other log-probabilities.*the model that is trained: VLLM_ALLOW_RUNTIME"):
        connect(lora_rank=RANK).update(weights_of(other, 0))


@pytest.mark.parametrize(
    ("started", "complaint"),
    [
        ({"adapters": None}, r"LoRA is not enabled.*It was started without --enable-lora"),
        ({"max_lora_rank": 1}, r"greater than max_lora_rank 1.*at least lora.r = 2.*--max-lora-rank 8"),
        ({"runtime_updating": False}, r"started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ],
)
def test_a_server_that_loads_no_adapters_is_refused_with_what_it_lacks(fake, connect, started, complaint):
    for name, value in started.items():
        setattr(fake, name, value)
    with pytest.raises(ServiceError, match=f"did not load the adapter.*{complaint}"):
        connect(lora_rank=RANK).update(weights_of(adapted(0), 0))


def test_a_folder_that_the_server_cannot_read_is_told(connect, tmp_path, monkeypatch):
    away = Adapter("a", 1, tmp_path / "away")
    monkeypatch.setattr("palestra.extras.vllm.server.AdapterFolders.write", lambda *_: away)
    with pytest.raises(ServiceError, match=r"No adapter found.*rollout\.weights_folder must be a folder that"):
        connect(lora_rank=RANK).update(weights_of(adapted(0), 0))


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_folder_that_cannot_be_written_is_told(connect, tmp_path, rank):
    (tmp_path / "taken").touch()
    with pytest.raises(StorageError, match=r"could not be saved to rollout\.weights_folder: .*Not a directory"):
        connect(folder=tmp_path / "taken", lora_rank=rank).update(weights_of(adapted(0), 0))


def test_a_rank_beyond_vllms_is_refused_before_it_is_asked(connect):
    with pytest.raises(UnsupportedError, match=r"rank 512 at most, and lora\.r is 600"):
        connect("http://127.0.0.1:9", lora_rank=600)


def test_a_server_that_was_restarted_ends_the_run_not_its_rollouts(fake, connect):
    sampler = connect(lora_rank=RANK)
    sampler.update(weights_of(adapted(0), 0))
    fake.adapters = {}
    with pytest.raises(ConnectionError, match=r"has lost the model, as by a restart.*Resume the run"):
        turn(sampler, SamplingParams(4), [5])


def test_rollout_actors_ask_for_the_adapter_that_the_driver_has_loaded(connect):
    driver, actor = connect(lora_rank=RANK), connect(lora_rank=RANK)
    sent: list[PackedWeights] = []

    class Cluster:
        share, update_all, close = sent.append, staticmethod(lambda *_: []), staticmethod(lambda: None)

    pool = RolloutPool(Cluster(), 2, server=driver)
    pool.update(weights_of(adapted(0), 3))
    GroupSampler(actor, {}).update(sent[0])
    assert turn(actor, SamplingParams(4, seed=1), [5]).versions.tolist() == [3] * 4
    assert actor.served_model == driver.served_model
    pool.release()
    with pytest.raises(ConnectionError):
        turn(actor, SamplingParams(4, seed=1), [5])


def test_the_base_of_an_adapted_model_is_saved_without_its_adapter(tiny_tokenizer, tmp_path):
    base = random_model(0)
    expected = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    folder = save_base(add_lora(base, LoraSection(r=RANK)), tiny_tokenizer, tmp_path / "base")
    again = type(base).from_pretrained(folder).state_dict()
    torch.testing.assert_close(dict(again), expected, rtol=0, atol=0)
