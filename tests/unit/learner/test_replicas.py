"""Parts of a batch side by side: the same gradient as in one pass, the same bits however many run at once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from small_learner import build, gradients, loss_of, make_samples, settings
from torch import nn

from palestra.algo.batch import Batch
from palestra.learner import replicas as replicas_module
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.learner.replicas import Replicas, can_be_replicated

SAMPLES = make_samples(groups=6, siblings=4)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "WORTH_A_PART", 40)


def learner(module: nn.Module | None = None, at_once: int = 1, **sections: dict[str, Any]) -> LocalLearner:
    made = LocalLearner(module or build(), config=settings(**sections))
    if made._replicas is not None:
        made._replicas._at_once = at_once
    return made


def in_one_pass(module: nn.Module | None = None, **sections: dict[str, Any]) -> LocalLearner:
    made = learner(module, **sections)
    made._replicas = None
    return made


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("echo", [0.0, 0.1])
def test_the_gradient_the_metrics_and_each_tokens_results_are_those_of_one_pass(at_once: int, echo: float) -> None:
    loss = loss_of(SAMPLES, echo_coefficient=echo, entropy_coefficient=0.01)
    parts, whole = learner(at_once=at_once), in_one_pass()
    found, expected = (one.forward_backward(Batch.of(SAMPLES), loss) for one in (parts, whole))
    assert (len(found.token_logprobs), len(expected.token_logprobs)) == (4, 1)
    ours, theirs = gradients(parts), gradients(whole)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    assert found.metrics() == pytest.approx(expected.metrics() | {"tokens_computed": found.costs()["tokens_computed"]})
    np.testing.assert_allclose(found.logprobs(), expected.logprobs(), rtol=1e-4, atol=1e-5)


def test_training_gives_the_same_bits_however_many_parts_run_at_once() -> None:
    trained = []
    for at_once in (1, 2, 4):
        one = learner(at_once=at_once)
        for _ in range(3):
            one.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
            one.forward_backward(Batch.of(SAMPLES[:8]), loss_of(SAMPLES))
            one.optim_step(1e-2, max_grad_norm=1.0)
        trained.append(one.model.state_dict())
    for other in trained[1:]:
        assert all(torch.equal(value, other[name]) for name, value in trained[0].items())


def test_parts_run_in_threads_of_their_own() -> None:
    one, seen = learner(at_once=2), set()
    assert one._replicas is not None

    def work(scorer: Any, part: int) -> int:
        seen.add(threading.current_thread().name)
        return part

    assert one._replicas.run(work, 4) == [0, 1, 2, 3]
    assert all("learner-part" in name for name in seen)


def test_adapters_are_trained_side_by_side_too() -> None:
    config = settings(lora={"r": 4, "dropout": 0.0})
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        model = add_lora(build(), config.lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(2))
        models.append(model)
    parts, whole = learner(models[0], lora={"r": 4, "dropout": 0.0}), in_one_pass(models[1], lora={"r": 4})
    for one in (parts, whole):
        one.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
    theirs = gradients(whole)
    assert any("lora_A" in name for name in theirs)
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-7)


def test_a_part_that_fails_fails_the_batch_and_leaves_no_gradient() -> None:
    one = learner(at_once=2)
    one.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
    one.discard_gradients()
    assert one._replicas is not None

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no luck")

    one._replicas._made[1].scorer.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no luck"):
        one.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
    assert not gradients(one)
    assert all(own.grad is None for replica in one._replicas._made for _, own in replica.pairs)


def test_weights_that_were_exchanged_or_frozen_are_seen() -> None:
    parts, whole = learner(), in_one_pass()
    parts.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
    parts.discard_gradients()
    for one in (parts, whole):
        other = {name: value * 1.1 for name, value in build().state_dict().items()}
        one.model.load_state_dict(other, assign=True)
        one.model.model.embed_tokens.requires_grad_(False)
        one.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
    theirs = gradients(whole)
    assert "model.embed_tokens.weight" not in theirs
    assert gradients(parts).keys() == theirs.keys()
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-7)


def test_a_hook_at_a_weight_sees_the_whole_gradient() -> None:
    one, seen = learner(), []
    weight = next(one.model.parameters())
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    one.forward_backward(Batch.of(SAMPLES), loss_of(SAMPLES))
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_only_small_models_in_float32_without_dropout_are_divided() -> None:
    plain = learner()
    assert plain._replicas is not None
    assert learner(build(torch.bfloat16))._replicas is None
    assert learner(model={"gradient_checkpointing": True})._replicas is None
    model = build()
    model.extra = nn.Dropout(0.1)
    assert not can_be_replicated(model, plain._scorer)


def test_who_gives_a_number_of_threads_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner()
    monkeypatch.setattr(replicas_module, "processors", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Replicas(one.model, one._scorer, None)._at_once == 4
    assert Replicas(one.model, one._scorer, 1)._at_once == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert Replicas(one.model, one._scorer, None)._at_once == 1


def test_a_small_batch_is_one_part() -> None:
    found = learner().forward_backward(Batch.of(SAMPLES[:3]), loss_of(SAMPLES[:3]))
    assert len(found.token_logprobs) == 1
