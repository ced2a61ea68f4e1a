"""The cost model before a run: what does not fit is refused with the setting that would, the rest is told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from palestra.core.config import RunConfig
from palestra.core.errors import ResourceError
from palestra.core.types import Rollout, Turn
from palestra.evals.report import EvalReport
from palestra.learner.micro_batches import captured_tokens, device_of, micro_batch_tokens
from palestra.plan.device import GIB
from palestra.plan.of_config import STEP_SIZES
from palestra.train.forecast import Overview, forecast, kv_memory_for, refuse_what_cannot_fit, with_step_size

CUDA = torch.device("cuda:0")
STEP_SIZES_WITH_TOKENS = [(*size, 1024) for size in STEP_SIZES]
QWEN_8B = Qwen3Config(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                      head_dim=128, intermediate_size=12288, vocab_size=151936)  # fmt: skip

SMALL = Qwen3Config(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                    head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True)  # fmt: skip
QWEN_4B = Qwen3Config(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                      head_dim=128, intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True)  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An RTX 4090 that nobody else uses."""
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    on(monkeypatch, "NVIDIA GeForce RTX 4090", 23.5, 23.5)


def on(monkeypatch: pytest.MonkeyPatch, name: str, free_gib: float, total_gib: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (int(free_gib * GIB), int(total_gib * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda where: 0)


def config(**settings: Any) -> RunConfig:
    return RunConfig.build({"model.name": "Qwen/Qwen3-8B"}, settings)


def test_all_weights_of_a_large_model_are_refused_with_the_setting_that_fits() -> None:
    with pytest.raises(ResourceError, match=r"Qwen3-8B does not fit: .* use .*--lora\.") as caught:
        refuse_what_cannot_fit(config(), QWEN_8B, CUDA)
    assert "needs at least 1" in str(caught.value)  # a hundred GiB and more
    refuse_what_cannot_fit(config(**{"lora.load_in_4bit": True}), QWEN_8B, CUDA)


def test_a_model_that_is_only_sampled_from_needs_memory_for_its_weights_and_a_cache(monkeypatch) -> None:
    refuse_what_cannot_fit(config(), QWEN_8B, CUDA, training=False)
    on(monkeypatch, "NVIDIA GeForce RTX 4090", 16.0, 23.5)
    with pytest.raises(ResourceError, match=r"its weights need 15\.\d GiB and the cache of one rollout 0\.\d, and"):
        refuse_what_cannot_fit(config(), QWEN_8B, CUDA, training=False)


def test_sizes_of_a_step_are_chosen_by_the_gpu_and_said_in_one_line(tmp_path: Path) -> None:
    chosen = with_step_size(config(), SMALL, CUDA)
    sizes = (chosen.train.problems_per_step, chosen.rollout.group_size, chosen.rollout.max_new_tokens)
    assert sizes in STEP_SIZES_WITH_TOKENS
    keys = ("train.problems_per_step", "rollout.group_size")
    overview = Overview(600_000_000, 600_000_000, 2, "cuda", "bfloat16", 10, 5, 100, chosen, chosen=keys)
    assert overview.text(tmp_path).splitlines()[3] == (
        f"chosen for 600 M weights on cuda: train.problems_per_step = {sizes[0]}, rollout.group_size = {sizes[1]}; "
        "set to override"
    )


def test_memory_that_others_hold_is_not_used_and_too_large_a_micro_batch_will_be_halved(monkeypatch) -> None:
    refuse_what_cannot_fit(config(**{"lora.r": 8, "train.tokens_per_micro_batch": 1 << 20}), SMALL, CUDA)
    refuse_what_cannot_fit(config(), SMALL, CUDA)
    chosen = with_step_size(config(), SMALL, CUDA)
    on(monkeypatch, "NVIDIA GeForce RTX 4090", 0.2, 23.5)
    with pytest.raises(ResourceError, match=r"and 0\.2 GiB of the GPU can be used"):
        refuse_what_cannot_fit(config(), SMALL, CUDA)
    assert with_step_size(config(), SMALL, CUDA) == chosen, "the sizes of a step are those of the GPU"


def test_a_gpu_without_figures_or_an_unknown_model_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_what_cannot_fit(config(), SimpleNamespace(to_dict=dict), CUDA)
    on(monkeypatch, "Voodoo 2", 0.01, 0.01)
    assert device_of(CUDA) is None
    refuse_what_cannot_fit(config(), QWEN_8B, CUDA)


def test_the_cache_leaves_room_for_what_the_learner_allocates_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(free_gib: float, model: Qwen3Config, **settings: Any) -> float | None:
        on(monkeypatch, "NVIDIA H200", free_gib, 139.8)
        return kv_memory_for(config(**settings), SimpleNamespace(device=CUDA, config=model))

    assert cache(139.0, SMALL) is None  # half of it leaves enough
    beside, tight = cache(139.0, QWEN_4B), cache(80.0, QWEN_4B)
    copied = cache(139.0, QWEN_4B, **{"train.beta": 0.1})
    needs = forecast(config(), QWEN_4B, CUDA)
    assert beside is not None and tight is not None and copied is not None and needs is not None  # noqa: PT018
    later = (needs.memory.optimizer + needs.memory.master_weights + needs.memory.working) / GIB
    assert later + beside < 139.0  # with whole micro-batches,
    assert 0 < tight < 40  # or with smaller ones
    assert beside - copied == pytest.approx(needs.memory.weights / GIB, rel=0.01)  # the reference is a copy
    chosen = config(**{"model.kv_memory_gib": 7.0})
    assert kv_memory_for(chosen, SimpleNamespace(device=CUDA, config=QWEN_4B)) == 7.0


def test_the_header_has_memory_and_step_time_and_the_evaluation_makes_it_better(tmp_path: Path) -> None:
    planned = forecast(config(), SMALL, CUDA)
    assert planned is not None
    sized = config().with_step_size()
    overview = Overview(600_000_000, 600_000_000, 2, "cuda", "bfloat16", 10, 5, 100, sized, planned)
    memory, step = overview.text(tmp_path).splitlines()[2:]
    assert memory.startswith("needs about ")
    assert " of 24 GiB (weights, gradients and optimizer " in memory
    assert step.startswith("a step may take ")
    part, share = planned.bottleneck
    assert step.endswith(f"; {'mostly' if share > 0.5 else 'the largest part is'} {part} ({share:.0%})")
    assert share == max(planned.time.parts.values()) / sum(planned.time.parts.values())
    turns = (Turn("template", tuple(range(40))), Turn("model", (1, 2), (0.0, 0.0), (0, 0)))
    report = EvalReport.of([Rollout("p", turns, (), "finished")], seconds=2.0)  # type: ignore[arg-type]
    assert overview.time_text(report).startswith("the training may take about ")
    short = Overview._seen(planned, report.rollouts)
    assert (short.work.prompt_tokens, short.work.new_tokens, short.work.tool_tokens) == (40, 2, 0)
    assert short.time.learning_s < planned.time.learning_s


def test_plan_and_learner_compute_as_many_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "NVIDIA H200", 139.0, 139.8)
    for settings in ({}, {"train.tokens_per_micro_batch": 8192}, {"lora.r": 8}):
        planned = forecast(config(**settings), SMALL, CUDA)
        assert planned is not None
        own = micro_batch_tokens(config(**settings), SMALL, CUDA, whole_logits=False)
        assert own == planned.work.tokens_per_micro_batch == settings.get("train.tokens_per_micro_batch", 32768)
    assert micro_batch_tokens(config(), SMALL, CUDA, whole_logits=True) == 16384
    assert micro_batch_tokens(config(), SMALL, torch.device("cpu"), whole_logits=False) == 16384
    on(monkeypatch, "Voodoo 2", 139.0, 139.8)
    assert micro_batch_tokens(config(), SMALL, CUDA, whole_logits=False) == 16384


def test_tokens_beyond_the_context_are_not_planned_for() -> None:
    small = Qwen3Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                        intermediate_size=128, vocab_size=512, max_position_embeddings=2048)  # fmt: skip
    sizes = {"train.problems_per_step": 4, "rollout.group_size": 4}
    planned = forecast(RunConfig.build({**sizes, "rollout.max_new_tokens": 100_000}), small, CUDA)
    assert planned is not None
    assert planned.work.new_tokens == 2048


def test_on_a_cpu_nothing_is_refused() -> None:
    refuse_what_cannot_fit(config(), QWEN_8B, torch.device("cpu"))
    found = forecast(config(), SMALL, torch.device("cpu"))
    assert found is not None
    assert not found.device.is_gpu


def test_what_other_processes_use_decides_of_no_shape_unless_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(free_gib: float) -> int:
        on(monkeypatch, "NVIDIA H200", free_gib, 139.8)
        return captured_tokens(config(**{"train.tokens_per_micro_batch": 8192}), SMALL, CUDA)

    assert limit(139.0) == limit(120.0) == limit(101.0) > limit(10.0) > limit(0.0) == 0
