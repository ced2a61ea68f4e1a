"""A running vLLM as the sampler: what is asked of it, and what happens where it is not the one it should be."""

import asyncio
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_vllm import random_model
from served import served

from palestra.core.config import RunConfig
from palestra.core.errors import MissingPackageError, RolloutError, ServiceError, SettingError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.vllm.server import VllmServerPolicy, read_completion
from palestra.train.setup import policy_for


def weights_of(model: Any, version: int) -> Weights:
    return Weights(version, lambda: {name: p.detach() for name, p in model.named_parameters()}, model)


def turn(policy: VllmServerPolicy, params: SamplingParams, prompt: list[int]) -> Turn:
    return asyncio.run(policy.sample(policy.open(prompt), params))


@pytest.mark.parametrize(("extension", "method"), [(True, "palestra_reload"), (False, "reload_weights")])
def test_new_weights_are_loaded_from_disk_while_requests_wait(fake, connect, tmp_path, extension, method):
    fake.extension = extension
    sampler, newer = connect(), random_model(1)
    sampler.update(weights_of(newer, 3))
    assert fake.calls == ["pause?mode=keep", method, "reset_prefix_cache?reset_running_requests=true", "resume"]
    assert sampler.version == fake.policy.version == 3
    assert list(tmp_path.iterdir()) == []  # nothing is left on disk
    torch.testing.assert_close(fake.policy.engine.model.state_dict(), newer.state_dict())


def test_a_server_that_keeps_its_old_weights_is_found_out(fake, connect):
    fake.forgets = True
    with pytest.raises(ServiceError, match=r"other log-probabilities than the learner.*PalestraWorker"):
        connect().update(weights_of(random_model(1), 1))


def test_logprobs_at_another_temperature_are_found_out(fake, connect):
    sharp = connect(temperature=0.3)
    sampled = fake.policy.sample

    async def raw(session: Any, params: SamplingParams) -> Turn:  # what --logprobs-mode raw_logprobs gives
        found = await sampled(session, params)
        return Turn("model", found.token_ids, found.logprobs * 0.3, 0, found.finish)

    fake.policy.sample = raw  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="--logprobs-mode processed_logprobs"):
        sharp.update(weights_of(random_model(1), 1))


def test_another_tokenizer_is_refused_before_anything_is_trained(fake, connect, tiny_tokenizer):
    fake.tokenizer = copy.deepcopy(tiny_tokenizer)
    fake.tokenizer.add_tokens(["lamps cost"])
    with pytest.raises(ServiceError, match=r"serves .the-model. with another tokenizer.*the model that is trained"):
        connect()


def test_a_model_of_another_shape_is_refused_with_the_remedy(fake, connect):
    other = Weights(1, lambda: {"model.unheard_of.weight": torch.zeros(2)})
    with pytest.raises(ServiceError, match=r"did not take new weights.*unheard_of.*vllm serve MODEL"):
        connect().update(other)
    assert fake.calls[-1] == "resume"  # those who wait go on


def test_no_server_is_an_error_with_the_command_that_starts_one(connect, monkeypatch):
    monkeypatch.setattr("palestra.extras.vllm.server._START_S", 0.0)
    with pytest.raises(ServiceError, match=r"no vLLM answers at vllm\.url.*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        connect("http://127.0.0.1:9")


def test_a_server_that_is_lost_ends_the_run_not_its_rollouts_within_the_time_limit(fake, connect):
    with served(fake.app()) as url:
        sampler = connect(url, timeout_s=0.2)
    with pytest.raises(ConnectionError, match=r"vLLM was lost for 0.2 s \(vllm.timeout_s\): .*could not be asked"):
        turn(sampler, SamplingParams(4), [5])


def test_a_conversation_that_fills_the_context_ends_there(connect):
    sampler = connect()
    assert len(turn(sampler, SamplingParams(50), [5] * 190).token_ids) == 10
    full = turn(sampler, SamplingParams(50), [5] * 200)
    assert (len(full.token_ids), full.finish) == (0, "length")


ABORTED = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}


@pytest.mark.parametrize("choices", [None, [], [ABORTED | {"logprobs": None}], [ABORTED]])
def test_an_answer_without_logprobs_and_an_aborted_turn_fail_their_rollout(choices):
    words = "ended a turn with 'abort'" if choices == [ABORTED] else "gave no token ids with logprobs"
    with pytest.raises(RolloutError, match=words):
        read_completion({} if choices is None else {"choices": choices}, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora.load_in_4bit", True), ("model.engine", "paged"), ("rollout.constrain_tool_calls", True),
        ("rollout.policy_url", "http://x"),
    ],
)  # fmt: skip
def test_settings_that_vllm_cannot_heed_are_refused_by_name(key, value):
    config = RunConfig.build({"vllm.mode": "server"}, {key: value})
    assert config.importance_correction == "token_truncate", "by default with vLLM"
    with pytest.raises(SettingError, match=key):
        policy_for(None, None, config)


def test_settings_of_another_mode_are_refused():
    with pytest.raises(SettingError, match=r"vllm\.url is for vllm\.mode = server, and that is off"):
        RunConfig.build({"vllm.url": "http://x"})
    with pytest.raises(SettingError, match=r"vllm\.max_model_len is for vllm\.mode = colocate"):
        RunConfig.build({"vllm.mode": "server", "vllm.max_model_len": 9})


def test_colocated_vllm_that_is_not_installed_is_told_with_its_remedy(tiny_tokenizer, monkeypatch):
    from palestra.extras.vllm.colocate import VllmColocatePolicy

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"needs vLLM in this environment.*palestra\[vllm\]"):
        VllmColocatePolicy("model", tiny_tokenizer, temperature=1.0)
