"""The learner's self-check at load: it notices planted faults, and hides no others behind its fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.algo.batching import MicroBatch, Tree
from palestra.core.errors import UnsupportedModel
from palestra.learner import forward, tree_attention
from palestra.learner.forward import Scorer
from palestra.learner.tree_attention import Layout

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
ATTENTION = tree_attention.tree_attention
HIDDEN = Scorer._packed_hidden

Plant = Callable[[pytest.MonkeyPatch], None]


def fresh(family: str, **extra: Any) -> nn.Module:
    """With the weights of its initialisation, which attend to all tokens nearly alike: the hardest case."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **extra), dtype=torch.float32)


def attend_by(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Tree attention with changed keywords."""

    def wrong(*tensors: Any, **keywords: Any) -> Any:
        return ATTENTION(*tensors, **change(keywords))

    return lambda patch: patch.setattr(forward, "tree_attention", wrong)


def siblings_see_each_other(keywords: dict[str, Any]) -> dict[str, Any]:
    """All completions of a tree as one long one."""
    layout = keywords["layout"]
    trees = (replace(tree, completion_lengths=(sum(tree.completion_lengths),)) for tree in layout.trees)
    return keywords | {"layout": Layout(tuple(trees), layout.device, root=layout.root)}


def completions_do_not_see_their_prompt(keywords: dict[str, Any]) -> dict[str, Any]:
    layout = keywords["layout"]
    starts = (Tree(t.start, t.prompt_length, ()) for t in layout.trees)
    rest = (Tree(t.start + t.prompt_length, 0, t.completion_lengths) for t in layout.trees)
    trees = tuple(part for pair in zip(starts, rest, strict=True) for part in pair)
    return keywords | {"layout": Layout(trees, layout.device, root=layout.root)}


def trees_do_not_see_the_root(keywords: dict[str, Any]) -> dict[str, Any]:
    layout = keywords["layout"]
    return keywords | {"layout": Layout((Tree(0, layout.root, ()), *layout.trees), layout.device)}


def no_window(keywords: dict[str, Any]) -> dict[str, Any]:
    return keywords | {"sliding_window": None}


def place_by(change: Callable[[MicroBatch], torch.Tensor]) -> Plant:
    """Other positions for RoPE."""

    def wrong(self: Scorer, micro: MicroBatch) -> torch.Tensor:
        return HIDDEN(self, replace(micro, position_ids=change(micro)))

    return lambda patch: patch.setattr(Scorer, "_packed_hidden", wrong)


def places_in_the_packed_run(micro: MicroBatch) -> torch.Tensor:
    return torch.arange(len(micro.token_ids))


def one_too_far_from_the_prompt(micro: MicroBatch) -> torch.Tensor:
    tree, _ = micro.trees
    places = torch.arange(len(micro.token_ids))
    return micro.position_ids + (places >= tree.start + tree.prompt_length)


def one_too_far_from_the_root(micro: MicroBatch) -> torch.Tensor:
    return micro.position_ids + (torch.arange(len(micro.token_ids)) >= micro.root)


FAULTS = {
    "siblings see each other": attend_by(siblings_see_each_other),
    "no prompt": attend_by(completions_do_not_see_their_prompt),
    "no root": attend_by(trees_do_not_see_the_root),
    "positions of the packed run": place_by(places_in_the_packed_run),
    "positions off by one": place_by(one_too_far_from_the_prompt),
    "positions behind the root off by one": place_by(one_too_far_from_the_root),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_wrong_mask_or_position_is_noticed(
    family: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Scorer(fresh(family)).mode == "trees"
    assert not caplog.records
    FAULTS[fault](monkeypatch)
    assert Scorer(fresh(family)).mode == "reference"
    assert "on a small check" in caplog.text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mask_or_position_is_noticed_in_bfloat16_too(
    fault: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model.to(torch.bfloat16)  # trained: a fault is told from rounding
    assert Scorer(model).mode == "trees"
    FAULTS[fault](monkeypatch)
    assert Scorer(model).mode == "reference"


@pytest.mark.parametrize("window", [5, 64, 1024])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_an_ignored_sliding_window_is_noticed(family: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Scorer(fresh(family, sliding_window=window)).mode == "trees"
    attend_by(no_window)(monkeypatch)
    assert Scorer(fresh(family, sliding_window=window)).mode == "reference"


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("full")]
)
def test_an_error_in_attention_is_raised_and_not_taken_for_a_model_that_does_not_fit(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*tensors: Any, **keywords: Any) -> Any:
        raise error

    monkeypatch.setattr(forward, "tree_attention", broken)
    model = fresh("qwen3")
    with pytest.raises(type(error), match=str(error)):
        Scorer(model)
    assert model.config._attn_implementation != tree_attention.NAME  # the model is left as it was


def test_a_model_that_says_it_is_not_supported_is_computed_in_padded_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*tensors: Any, **keywords: Any) -> Any:
        raise UnsupportedModel("its attention takes no keywords")

    monkeypatch.setattr(forward, "tree_attention", refuses)
    assert Scorer(fresh("qwen3")).mode == "reference"
    assert "its attention takes no keywords" in caplog.text
