"""The official SDK against the server."""

from typing import Any

import numpy as np
import pytest
from tinker_server import made

from palestra.core.http import Request

tinker = pytest.importorskip("tinker")
types = tinker.types
RANK = 4


def datum(tokens: list[int], weights: list[float] | None = None) -> Any:
    targets = tokens[1:]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights or [1.0] * len(targets)},
    )


def train(client: Any, data: list[Any], rate: float = 1e-2) -> float:
    gradients = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=rate))
    step.result()
    return float(gradients.result().metrics["loss:sum"])


def test_a_model_learns_what_it_is_shown_and_samples_it(sdk: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK, seed=1))
    words = [5, 9, 200, 31, 77, 300, 12]
    losses = [train(client, [datum(words)] * 2) for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]
    sampler = made(client.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(words[:2])
    params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
    found = sampler.sample(prompt, 2, params).result()
    assert [list(sequence.tokens) for sequence in found.sequences] == [words[2:]] * 2
    assert found.sequences[0].stop_reason == "length"
    assert all(logprob > -1.0 for logprob in found.sequences[0].logprobs)


def test_the_sampler_and_the_learner_agree_on_a_trained_model(sdk: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK, seed=2))
    words = [5, 9, 200, 31, 77, 300, 12]
    for _ in range(3):
        train(client, [datum(words)])
    learner = client.forward([datum(words)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    sampler = made(client.save_weights_and_get_sampling_client())
    prompt = sampler.compute_logprobs(types.ModelInput.from_ints(words)).result()
    assert prompt[0] is None
    np.testing.assert_allclose(prompt[1:], learner, atol=1e-4)
    turn = sampler.sample(types.ModelInput.from_ints(words), 1, types.SamplingParams(max_tokens=4, seed=3, stop=[]))
    sequence = turn.result().sequences[0]
    again = sampler.compute_logprobs(types.ModelInput.from_ints([*words, *sequence.tokens])).result()
    np.testing.assert_allclose(sequence.logprobs, again[len(words) :], atol=1e-4)


def test_a_pinned_version_samples_as_before_while_newer_ones_are_trained(sdk: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    first = made(client.save_weights_and_get_sampling_client())
    prompt, params = types.ModelInput.from_ints([5, 9]), types.SamplingParams(max_tokens=6, seed=7, stop=[])
    before = first.sample(prompt, 1, params).result().sequences[0]
    for _ in range(5):
        train(client, [datum([5, 9, 200, 31, 77, 300, 12])], rate=0.1)
    second = made(client.save_weights_and_get_sampling_client())
    newer = second.sample(prompt, 1, params).result().sequences[0]
    again = first.sample(prompt, 1, params).result().sequences[0]
    assert list(again.tokens) == list(before.tokens)
    assert list(again.logprobs) == list(before.logprobs)
    assert list(newer.tokens) != list(before.tokens)


def test_a_saved_state_goes_on_exactly_where_it_was(sdk: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    data = [datum([5, 9, 200, 31]), datum([7, 8, 9])]
    train(client, data)
    path = client.save_state("after-1").result().path
    expected = [train(client, data) for _ in range(3)]
    resumed = made(sdk.create_training_client_from_state_with_optimizer(path))
    assert [train(resumed, data) for _ in range(3)] == expected
    fresh = made(sdk.create_training_client_from_state(path))  # the same weights, without Adam's moments
    found = [train(fresh, data) for _ in range(3)]
    assert found[0] == expected[0]
    assert found[2] != expected[2]


def test_a_custom_loss_gives_the_gradient_of_the_built_in_one(sdk: Any) -> None:
    def weighted(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum(each.sum() for each in logprobs), {}

    data = [datum([5, 9, 200, 31]), datum([7, 8, 9])]
    norms = []
    for custom in (True, False):
        client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK, seed=5))
        if custom:
            client.forward_backward_custom(data, weighted).result()
        else:
            client.forward_backward(data, "cross_entropy").result()
        norms.append(client.optim_step(types.AdamParams()).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_what_a_client_trains_is_a_run_with_metrics_and_rollouts(sdk: Any, running: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    train(client, [datum([5, 9, 200, 31], [0.0, 1.0, 1.0])])
    folder = running.service.checkpoints.run(client.model_id)
    running.service.unload(client.model_id).future.result(10)  # all is written
    assert [row["step"] for row in folder.metrics()] == [1]
    assert folder.metrics()[0]["tokens"] == 3
    [rollout] = folder.rollouts()
    turns = [(turn["maker"], turn["token_ids"]) for turn in rollout["turns"]]
    assert turns == [("template", [5, 9]), ("model", [200, 31])]
    assert folder.config.model.name == "palestra/tiny"


def test_the_number_of_a_refused_request_counts(sdk: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    words = [5, 9, 200, 31]
    refused = [
        client.forward_backward([datum(words)], "stable_reinforce"),
        client.optim_step(types.DimuonParams(learning_rate=1e-3)),
        client.save_state("not/a/name"),
        client.save_weights_external("x", age_encryption_recipients=["age1"]),
    ]
    for request, says in zip(
        refused, ("forward_backward_custom", "adamw", "name a checkpoint", "encrypt"), strict=True
    ):
        with pytest.raises((tinker.TinkerError, ValueError), match=says):
            request.result(20)
    train(client, [datum(words)])  # none of these is waited for


def test_exported_weights_are_files_that_peft_loads(sdk: Any, running: Any, tmp_path: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    train(client, [datum([5, 9, 200, 31])])
    path = client.save_weights_external("mine").result().path
    assert path.endswith("/external_weights/mine")
    urls = tinker.RestClient(base_url=running.url, api_key="tml-test").get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        (tmp_path / name).write_bytes(Request(url).send().body)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    assert not {"manifest.json", "tinker.json"} & set(urls)  # the server's own notes


def test_a_sampling_client_loads_the_tokenizer_without_a_network(sdk: Any, base: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    path = client.save_weights_for_sampler("tokenizer").result().path
    samplers = [
        made(client.save_weights_and_get_sampling_client()),
        made(sdk.create_sampling_client(model_path=path)),
        made(sdk.create_sampling_client(base_model=base.path)),  # by its name SDK 0.38 looks for it on the hub
    ]
    for each in (client, *samplers):
        assert each.get_tokenizer().encode("What is 3 + 4?") == base.tokenizer.encode("What is 3 + 4?")
    names = [sampler.get_base_model() for sampler in samplers]
    again = made(sdk.create_sampling_client(base_model=names[0]))
    assert {*names, again.get_base_model()} == {base.path}


@pytest.mark.skipif(not hasattr(types, "SamplingClientKind"), reason="inflight sampling needs tinker 0.38")
def test_a_later_inflight_save_updates_all_inflight_clients(sdk: Any, running: Any) -> None:
    client = made(sdk.create_lora_training_client(base_model="palestra/tiny", rank=RANK))
    words = [5, 9, 200, 31, 77, 300, 12]
    prompt = types.ModelInput.from_ints(words)

    def logprobs(sampler: Any) -> list[float]:
        return [float(value) for value in sampler.compute_logprobs(prompt).result()[1:]]

    pinned = made(client.save_weights_and_get_sampling_client())
    first = made(client.save_weights_and_get_sampling_client(kind="inflight"))
    before = logprobs(pinned)
    assert logprobs(first) == before
    for _ in range(running.service.limits.versions + 1):  # more than the server keeps of snapshots
        train(client, [datum(words)])
    assert logprobs(first) == before  # what is trained alone is not published
    second = made(client.save_weights_and_get_sampling_client(kind="inflight"))
    third = made(client.save_weights_and_get_sampling_client(kind="inflight"))
    snapshot = made(client.save_weights_and_get_sampling_client())
    after = logprobs(snapshot)
    assert sum(after) > sum(before)
    assert logprobs(first) == logprobs(second) == logprobs(third) == after
    assert logprobs(pinned) == before
    ids = {sampler._sampling_session_id for sampler in (pinned, first, second, third, snapshot)}
    assert len(ids) == 5
