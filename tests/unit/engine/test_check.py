"""The self-check at load: right engines pass in every dtype, and a planted fault of each kind is noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from engine_families import tiny_model
from torch import Tensor

from palestra.core.errors import UnsupportedModel
from palestra.engine import supported
from palestra.engine.check import prompt_length, tolerated_difference
from palestra.engine.cpu import fast_decoder, plan
from palestra.engine.cpu.fast_decoder import CpuFastDecoder
from palestra.engine.cpu.kv_slots import KVSlots, Pages
from palestra.engine.cpu.plan import SharedPrefixes, SlotRows
from palestra.engine.engine import Engine
from palestra.models.loading import load_model

DTYPES = (torch.float32, torch.bfloat16)
Plant = Callable[[pytest.MonkeyPatch], None]


def wrong_window(patch: pytest.MonkeyPatch) -> None:
    """One token too far back."""
    right = supported.engine_attention

    def wrong(*args: Any, sliding_window: int | None = None, **options: Any) -> Any:
        return right(*args, sliding_window=sliding_window and sliding_window + 1, **options)

    patch.setattr(supported, "engine_attention", wrong)


def no_window(patch: pytest.MonkeyPatch) -> None:
    right = supported.engine_attention
    patch.setattr(supported, "engine_attention", lambda *args, sliding_window=None, **options: right(*args, **options))


def wrong_page_offset(patch: pytest.MonkeyPatch) -> None:
    """KV that comes back from pages is shifted by one token."""
    right = Pages.read

    def shifted(self: Pages, store: Tensor, table: list[int], start: int, stop: int) -> Tensor:
        tokens = right(self, store, table, start, stop)
        return torch.cat([tokens[:, :, :1], tokens[:, :, :-1]], 2)

    patch.setattr(Pages, "read", shifted)


def partial_page_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVSlots, "copy_page", lambda self, source, target: None)


def wrong_page(patch: pytest.MonkeyPatch) -> None:
    """What is written behind a page boundary goes into the page before."""
    right = Pages.write

    def write(self: Pages, store: Tensor, table: list[int], start: int, tokens: Tensor) -> None:
        right(self, store, [*table[:2], *table[1:]][: len(table)], start, tokens)

    patch.setattr(Pages, "write", write)


def prompt_sees_the_future(patch: pytest.MonkeyPatch) -> None:
    right = plan.attend_part
    patch.setattr(plan, "attend_part", lambda *args: right(*args[:5]))  # without `causal`


def appended_tokens_see_one_token_of_the_future(patch: pytest.MonkeyPatch) -> None:
    right = SlotRows.bias

    def wrong(self: SlotRows, window: int | None, group: int) -> Tensor | None:
        bias = right(self, window, group)
        return bias if bias is None or self.count == 1 else bias.roll(1, dims=-1)

    patch.setattr(SlotRows, "bias", wrong)


def short_rows_see_the_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotRows, "bias", lambda self, window, group: None)


def prefixes_are_masked_by_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    right = SharedPrefixes.bias

    def wrong(self: SharedPrefixes, *arguments: Any) -> Tensor | None:
        self.prefix_len = self.prefix_len - 1
        return right(self, *arguments)

    patch.setattr(SharedPrefixes, "bias", wrong)


@cache
def supported_model(family: str, dtype: torch.dtype) -> Any:
    """One that an engine without a fault is right for."""
    model = tiny_model(family).to(dtype)
    Engine(model, kv_memory_gib=0.01)
    return model


FAULTS: list[tuple[str, Plant]] = [
    ("gemma2", wrong_window),
    ("gemma2", no_window),
    ("olmo2", wrong_page_offset),
    ("olmo2", partial_page_not_copied),
    ("olmo2", wrong_page),
    ("olmo2", prompt_sees_the_future),
    ("olmo2", short_rows_see_the_padding),
    ("olmo2", prefixes_are_masked_by_a_token_too_many),
]


@pytest.mark.parametrize(
    ("family", "plant", "dtype"),
    [
        *[(*fault, dtype) for fault in FAULTS for dtype in DTYPES],
        ("olmo2", appended_tokens_see_one_token_of_the_future, torch.float32),  # too little to see in bfloat16
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_planted_fault_is_noticed(
    family: str, plant: Plant, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = supported_model(family, dtype)
    plant(monkeypatch)
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        Engine(model, kv_memory_gib=0.01)


def fast_decoder_ignores_the_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fast_decoder, "sliding_window", lambda attention: None)


def fast_decoder_has_a_wrong_window(patch: pytest.MonkeyPatch) -> None:
    right = fast_decoder.sliding_window
    patch.setattr(fast_decoder, "sliding_window", lambda attention: right(attention) - 1)  # type: ignore[operator]


def fast_decoder_scales_rope_wrongly(patch: pytest.MonkeyPatch) -> None:
    right = CpuFastDecoder._extend_rope

    def wrong(self: CpuFastDecoder, length: int) -> None:
        inv_freq = self.model.model.rotary_emb.inv_freq
        inv_freq.mul_(0.98)
        right(self, length)
        inv_freq.div_(0.98)

    patch.setattr(CpuFastDecoder, "_extend_rope", wrong)


def fast_decoder_forgets_yarns_attention_factor(patch: pytest.MonkeyPatch) -> None:
    right = CpuFastDecoder._extend_rope

    def wrong(self: CpuFastDecoder, length: int) -> None:
        right(self, length)
        self._cos = self._cos / self.model.model.rotary_emb.attention_scaling

    patch.setattr(CpuFastDecoder, "_extend_rope", wrong)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "changes", "plant"),
    [
        ("mistral", {}, fast_decoder_ignores_the_window),
        ("mistral", {}, fast_decoder_has_a_wrong_window),
        ("llama", {}, fast_decoder_scales_rope_wrongly),
        ("llama", {"rope_parameters": YARN}, fast_decoder_forgets_yarns_attention_factor),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_fault_of_the_fast_decoder_alone_falls_back_to_the_module(
    family: str,
    changes: dict[str, Any],
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(family, **changes)
    assert Engine(model, kv_memory_gib=0.01).runner.fast_decoder is not None  # type: ignore[attr-defined]
    plant(monkeypatch)
    engine = Engine(model, kv_memory_gib=0.01)
    assert engine.runner.fast_decoder is None  # type: ignore[attr-defined]
    assert "falling back to the module's own layers" in caplog.text
    assert engine.pool.free == engine.pool.pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "gpt2"])
def test_a_right_engine_passes_in_every_dtype(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    Engine(tiny_model(family).to(dtype), kv_memory_gib=0.01)
    assert not [record for record in caplog.records if record.name.startswith("palestra")]


def test_rounding_of_a_trained_model_is_tolerated_and_not_much_more(caplog: pytest.LogCaptureFixture) -> None:
    model = load_model("palestra/tiny").model
    with caplog.at_level(logging.DEBUG, "palestra.engine.check"):
        for dtype in DTYPES:
            Engine(model.to(dtype), kv_memory_gib=0.05)
    for record in caplog.records:
        difference, tolerated = record.args  # type: ignore[misc]
        assert 0 < difference < tolerated < 20 * difference  # type: ignore[operator]
    assert tolerated_difference(model.to(torch.bfloat16), spread=2.0) < 0.05
    assert tolerated_difference(model.to(torch.float32), spread=2.0) < 2e-5


@pytest.mark.parametrize(
    ("window", "page_size", "capacity", "length"),
    [
        (None, 16, 10_000, 29),  # in the second page, three tokens before its end
        (None, 64, 10_000, 125),
        (7, 16, 10_000, 29),
        (40, 16, 10_000, 93),  # behind twice the window, three tokens before the end of a page
        (4096, 16, 10_000, 4365),
        (1 << 20, 16, 1 << 30, 29),  # too long to be checked
        (None, 16, 53, 19),  # all turns fit into the memory
        (None, 16, 3, 1),
    ],
)
def test_prompt_of_the_check_passes_page_and_window(
    window: int | None, page_size: int, capacity: int, length: int
) -> None:
    model = tiny_model("mistral", sliding_window=window)
    assert prompt_length(model, page_size, capacity) == length


@pytest.mark.parametrize(
    ("error", "fast"),
    [(torch.OutOfMemoryError("no memory"), False), (ValueError("a bug"), False), (MemoryError(), False),
     (RuntimeError("out of resources"), True)],
)  # fmt: skip
def test_other_errors_are_raised_as_they_are(error: Exception, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")

    def broken(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(*((CpuFastDecoder, "__call__") if fast else (model.model.layers[1].mlp, "forward")), broken)
    with pytest.raises(type(error)):
        Engine(model, kv_memory_gib=0.01)
