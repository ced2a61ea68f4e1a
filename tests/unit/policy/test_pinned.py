"""A policy on a sampling copy stays at its version while the original is trained, and follows an update."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.models.loading import load_model
from palestra.policy.local import LocalPolicy
from palestra.policy.module import sampling_copy

PROMPT = [5, 9, 33, 21, 60, 2, 7, 44]


def tiny(kind: str) -> Any:
    model = load_model("palestra/tiny").model
    if kind == "full":
        return model
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def train(model: Any) -> None:
    """A few steps of an optimizer that writes in place."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.tensor([PROMPT])
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def turns(policy: LocalPolicy) -> list[Turn]:
    async def main() -> list[Turn]:
        group = policy.fork(policy.open(PROMPT), 3)
        made = await asyncio.gather(*(policy.sample(s, SamplingParams(12, seed=i)) for i, s in enumerate(group)))
        for session in group:
            policy.close(session)
        return list(made)

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_policy_on_a_copy_samples_its_version_until_it_is_updated(kind: str) -> None:
    model = tiny(kind)
    policy = LocalPolicy(sampling_copy(model), kv_memory_gib=0.05, self_check=False)
    before = turns(policy)
    train(model)
    assert turns(policy) == before, "the copy must not see the training"
    assert all(turn.versions.tolist() == [0] * 12 for turn in before)

    policy.update(Weights(1, lambda: trainable(model), model))
    after = turns(policy)
    expected = turns(LocalPolicy(model, kv_memory_gib=0.05, self_check=False))
    assert [turn.token_ids.tolist() for turn in after] == [turn.token_ids.tolist() for turn in expected]
    assert [turn.token_ids.tolist() for turn in after] != [turn.token_ids.tolist() for turn in before]
    assert all(turn.versions.tolist() == [1] * 12 for turn in after)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_copy_shares_what_is_frozen_and_owns_what_is_trained(kind: str) -> None:
    model = tiny(kind)
    copied = dict(sampling_copy(model).named_parameters())
    owned = 0
    for name, parameter in model.named_parameters():
        assert (copied[name].data_ptr() == parameter.data_ptr()) == (not parameter.requires_grad), name
        assert not copied[name].requires_grad
        owned += parameter.requires_grad
    assert owned == len(trainable(model)) > 0
    train(model)  # the original can still be trained


def test_tied_weights_stay_tied_in_the_copy() -> None:
    model = tiny("full")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    copied = sampling_copy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight is not model.lm_head.weight
