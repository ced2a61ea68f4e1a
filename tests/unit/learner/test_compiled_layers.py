"""How layers are handed to the compiler: as one program for all of them, and for micro-batches of every size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from palestra.engine.attention import attention_chunk
from palestra.learner import compiled_layers, self_check
from palestra.learner.forward import Scorer


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each call of what would be compiled: whether its input needs a gradient."""
    calls: list[bool] = []

    def uncompiled(call: Any) -> Any:
        def run(layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(hidden.requires_grad)
            return call(layer, hidden, *args, **kwargs)

        return run

    compiled_layers._compiled_layer.cache_clear()
    monkeypatch.setattr(compiled_layers, "_compiled", uncompiled)
    yield calls
    compiled_layers._compiled_layer.cache_clear()


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
    config = LlamaConfig(**shape, num_hidden_layers=4, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_layers_over_frozen_embeddings_are_called_as_the_others(runs: list[bool]) -> None:
    frozen = model()
    frozen.get_input_embeddings().requires_grad_(False)
    scorer = Scorer(frozen, compile_layers=True)  # compares gradients with the model's own
    assert scorer.compiled
    assert runs == [True] * 4


def test_without_gradients_layers_have_no_input_that_needs_one(runs: list[bool]) -> None:
    scorer = Scorer(model(), compile_layers=True)
    runs.clear()
    with torch.no_grad(), scorer.session():
        logprobs, _ = scorer(self_check._probe(scorer.model, True))
    assert runs == [False] * 4
    assert not logprobs.requires_grad


def test_a_frozen_model_is_checked_as_it_will_be_called(runs: list[bool]) -> None:
    reference = model().requires_grad_(False).eval()
    modes: list[tuple[bool, bool]] = []
    reference.model.layers[0].register_forward_hook(
        lambda layer, *_: modes.append((layer.training, torch.is_grad_enabled()))
    )
    assert Scorer(reference, compile_layers=True).compiled
    assert runs == [False] * 4
    assert set(modes) == {(False, False)}  # it is a reference: in evaluation mode, without gradients


def test_traced_layers_are_remembered_on_disk_until_what_they_hold_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rule = tmp_path / "rule.py"
    monkeypatch.setattr(compiled_layers, "TRACED_FILES", [rule])
    hashes = []
    for text in ("keep products", "keep products", "keep nothing"):
        rule.write_text(text)
        hashes.append(compiled_layers._checkpoint_contexts().cache_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_files_of_traced_layers_are_there() -> None:
    assert all(path.is_file() for path in compiled_layers.TRACED_FILES)


def test_a_larger_check_begins_with_the_same_rows() -> None:
    small, large = (self_check._probe(model(), True, size=size) for size in (0, 16 * 1000))
    assert len(large.token_ids) - len(small.token_ids) == 1000 // 128 * 128
    for name in ("token_ids", "position_ids", "source", "target"):
        mine = getattr(small, name)
        assert torch.equal(getattr(large, name)[: len(mine)], mine)


def test_a_layers_number_is_no_reason_to_compile_again() -> None:
    class NoNumber(nn.Module):
        config = Qwen3Config(num_hidden_layers=2)  # has layer_types

    assert attention_chunk(NoNumber()) is None, "reading layer_idx makes the compiler make a program for each layer"
