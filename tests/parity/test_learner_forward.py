"""The learner's packed, prefix-shared pass gives the numbers of the plain forward, family by family."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_families import FAMILIES, RECURRENT, tiny_model
from family_cases import quick_case
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, pack
from palestra.core.types import Sample
from palestra.engine.recurrent import RowStates
from palestra.learner import compiled_layers, tree_recurrence
from palestra.learner.forward import Scorer
from palestra.learner.tree_attention import pack_batch

VOCABULARY = 128
WINDOW = {"sliding_window": 5}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOW, "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 3.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama4_text": {"attention_chunk_size": 8, "floor_scale": 6},  # rows reach beyond both
    **dict.fromkeys(("mistral", "gemma3_text", "olmo3", "cohere2", "gpt_oss"), WINDOW),
}
CASES = [
    *((family, 1000, False) for family in {**FAMILIES, **CHANGES}),
    *((family, 24, False) for family in {**FAMILIES, **CHANGES} if family not in RECURRENT),
    *((family, 1000, True) for family in ("lfm2", "nemotron_h")),
]


ROWS = ((11, (7, 1, 12)), (6, (4, 4)), (8, (9,)))
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear")
ALL_OF_IT = bool(os.environ.get("PALESTRA_TEST_SLOW"))
LONG_ROWS = ((150, (7, 1, 12)), (64, (70, 4)), (8, (9,)))  # gated delta nets compute chunks of 64 tokens


def groups(rows: tuple[tuple[int, tuple[int, ...]], ...] = ROWS) -> list[Sample]:
    """Two groups with siblings of unlike lengths, one with a tool result inside, and a lone row."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(n)]

    samples = []
    for group, (prompt_length, lengths) in enumerate(rows):
        prompt = tokens(prompt_length)
        for n in lengths:
            trained = [False] * prompt_length + [not 3 <= i < 5 for i in range(n)]
            observed = [not t and i >= prompt_length for i, t in enumerate(trained)]
            size = prompt_length + n
            samples.append(Sample(prompt + tokens(n), trained, observed, [0.0] * size, 1.0, group, prompt_length))
    return samples


def packed(samples: list[Sample], max_tokens: int, share_prefix: bool = True, **more: Any) -> list[MicroBatch]:
    options = {"max_tokens": max_tokens, "share_prefix": share_prefix, "device": torch.device("cpu"), **more}
    return pack_batch(Batch.of(samples), echo=True, **options)


def begin_alike(samples: list[Sample]) -> list[Sample]:
    """The same rows behind ten common tokens."""
    no, beginning = [False] * 10, list(range(50, 60))
    return [
        Sample(
            [*beginning, *s.token_ids],
            [*no, *s.policy_mask],
            [*no, *s.echo_mask],
            [0.0] * 10 + list(s.logprobs),
            1.0,
            s.group,
            10 + s.prompt_length,
        )
        for s in samples
    ]


def plain(model: torch.nn.Module, samples: list[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the scored tokens, one row at a time, from whole logits; tool results at 1."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = torch.tensor([sample.token_ids.tolist()])
        scale = torch.where(torch.tensor(sample.echo_mask.tolist())[1:, None], 1.0, temperature)
        logp = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float() / scale, -1)
        scored = torch.tensor((sample.policy_mask | sample.echo_mask).tolist())[1:]
        logprobs.append(logp.gather(-1, ids[0, 1:, None]).squeeze(-1)[scored])
        entropies.append(-(logp.exp() * logp).sum(-1)[scored])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: torch.nn.Module, logprobs: Tensor, entropies: Tensor) -> list[Tensor]:
    """Of an arbitrary loss that weighs every token differently."""
    model.zero_grad()
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    ((logprobs * weights).sum() + 0.3 * (entropies * weights.flip(0)).sum()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A tiny model that computes in float64 also where its code, or ours, asks for float32.

    In float32 the gradients of A_log and dt_bias are up to 0.7 % off with long prompts, those of the plain forward as
    much as ours: no limit could tell rounding from a defect.
    """

    def build(family: str, **changes: Any) -> Any:
        model = tiny_model(family, **changes).double()
        model.set_experts_implementation("eager")  # grouped_mm has no float64
        torch.set_default_dtype(torch.float64)
        for name in ("float32", "float"):
            monkeypatch.setattr(torch, name, torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return model

    yield build
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("family", "max_tokens", "checkpointing"), [quick_case(*case) for case in CASES])
def test_packed_trees_give_the_plain_logprobs_and_gradients(
    family: str, max_tokens: int, checkpointing: bool, in_double: Callable[..., Any]
) -> None:
    build = in_double if family in DELTA_NETS else tiny_model
    model, samples = build(family, **CHANGES.get(family, {})), groups()
    expected = plain(model, samples, 0.7)
    theirs = gradients(model, *expected)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    scorer = Scorer(model, temperature=0.7)
    assert scorer.mode == "trees"
    with scorer.session():
        parts = [scorer(batch, entropy_gradient=True) for batch in packed(samples, max_tokens)]
        got = tuple(torch.cat(x) for x in zip(*parts, strict=True))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        ours = gradients(model, *got)
    for mine, own in zip(ours, theirs, strict=True):
        assert float((mine - own).norm()) <= 1e-4 * float(own.norm()) + 1e-6


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[int, int]]]:
    """Let layers be traced as on a GPU, without generating code; gives the numbers of programs and of graph breaks.

    Their gradient is traced by `make test-slow` alone.
    """
    counters = torch._dynamo.utils.counters

    def traced(call: Any) -> Any:
        return torch.compile(call, dynamic=True, backend="aot_eager" if ALL_OF_IT else "eager")

    def count() -> tuple[int, int]:
        return counters["stats"]["unique_graphs"], counters["graph_break"].total()

    torch._dynamo.reset()
    counters.clear()
    compiled_layers._compiled_layer.cache_clear()
    monkeypatch.setattr(compiled_layers, "_compiled", traced)
    yield count
    compiled_layers._compiled_layer.cache_clear()
    torch._dynamo.reset()


def traced(family: str, kinds: int) -> Any:
    """A family, and how many kinds of layers it has. Tracing takes five to twenty seconds a family."""
    slow = pytest.mark.slow("make test-slow traces all families")
    return pytest.param(family, kinds, marks=() if family in ("gemma2", "qwen3_5_text") else slow)


COMPILED = {"llama": 1, "gemma2": 2, "gpt_oss": 2, "qwen3_5_text": 2, "lfm2": 2, "olmo_hybrid": 2, "bamba": 2}


@pytest.mark.parametrize(("family", "kinds"), [traced(*each) for each in COMPILED.items()])
def test_compiled_layers_give_the_plain_logprobs_and_gradients(
    family: str, kinds: int, programs: Any, in_double: Callable[..., Any]
) -> None:
    build = in_double if family in DELTA_NETS else tiny_model
    model, samples = build(family, **CHANGES.get(family, {})), groups()
    model.set_experts_implementation("batched_mm")  # on a CPU the grouped product cannot be traced
    expected = plain(model, samples, 0.7)
    theirs = gradients(model, *expected)
    scorer = Scorer(model, temperature=0.7, compile_layers=True)
    assert (scorer.mode, scorer.compiled) == ("trees", True)
    for max_tokens in (1000, 30):
        micros = packed(samples, max_tokens)
        with scorer.session(training=True):
            parts = [scorer(micro, entropy_gradient=True) for micro in micros]
            got = tuple(torch.cat(x) for x in zip(*parts, strict=True))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            ours = gradients(model, *got)
        for mine, own in zip(ours, theirs, strict=True):
            assert float((mine - own).norm()) <= 1e-4 * float(own.norm()) + 1e-6
    assert programs() == (kinds, 0)


@pytest.mark.parametrize("family", [*map(quick_case, RECURRENT)])
def test_the_check_does_not_take_rounding_for_a_defect(family: str) -> None:
    """The gradient of a decay's bias is nothing but rounding in some of these models."""
    model = tiny_model(family).to(torch.bfloat16)
    assert Scorer(model, compile_layers=False).mode == "trees"


@pytest.mark.parametrize("family", [*map(quick_case, {**FAMILIES, **CHANGES})])
def test_a_root_gives_the_plain_logprobs_and_gradients(family: str, in_double: Callable[..., Any]) -> None:
    build = in_double if family in DELTA_NETS else tiny_model
    model, samples = build(family, **CHANGES.get(family, {})), begin_alike(groups())
    expected = plain(model, samples, 0.7)
    theirs = gradients(model, *expected)
    scorer = Scorer(model, temperature=0.7)
    assert scorer.shares_root
    micros = packed(samples, 1000, min_root=5)
    assert [micro.root for micro in micros] == [10]
    with scorer.session():
        got = tuple(torch.cat(x) for x in zip(*(scorer(micro, entropy_gradient=True) for micro in micros), strict=True))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        ours = gradients(model, *got)
    for mine, own in zip(ours, theirs, strict=True):
        assert float((mine - own).norm()) <= 1e-4 * float(own.norm()) + 1e-6


def worst_gradient(
    model: Any, samples: list[Sample], meddle: Callable[[], None] = lambda: None, **options: Any
) -> float:
    """The largest distance of a parameter's gradient from that of the plain forward, relative to the latter."""
    scorer = Scorer(model, temperature=0.7)
    assert scorer.mode == "trees"
    theirs = gradients(model, *plain(model, samples, 0.7))
    meddle()
    with scorer.session():
        [micro] = packed(samples, 1000, **options)
        ours = gradients(model, *scorer(micro, entropy_gradient=True))
    return max(float((mine - own).norm() / (own.norm() + 1e-9)) for mine, own in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", [*map(quick_case, [*DELTA_NETS, "nemotron_h"])])
def test_long_prompts_give_the_plain_gradients(family: str, in_double: Callable[[str], Any]) -> None:
    assert worst_gradient(in_double(family), groups(LONG_ROWS)) < 1e-9


@pytest.mark.parametrize("family", [*map(quick_case, ["lfm2", "nemotron_h", *DELTA_NETS])])
@pytest.mark.parametrize("min_root", [0, pytest.param(5, marks=pytest.mark.slow("make test-slow takes both"))])
def test_prompts_of_many_lengths_give_the_plain_gradients_in_few_calls(
    family: str, min_root: int, in_double: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    compute = tree_recurrence.RecurrentLayer.__call__

    def counted(layer: Any, *arguments: Any) -> Tensor:
        calls.append(layer.number)
        return compute(layer, *arguments)

    samples = begin_alike(groups(tuple((length, (3, 3)) for length in (60, 61, 64, 68, 73, 77, 80, 87))))
    monkeypatch.setattr(tree_recurrence.RecurrentLayer, "__call__", counted)
    assert worst_gradient(in_double(family), samples, meddle=calls.clear, min_root=min_root) < 1e-9
    of_prompts = 8 if family == "kimi_linear" else 2  # whose rule has no stand-in that knows of padding
    assert calls.count(0) == (min_root > 0) + of_prompts + 1


@pytest.mark.parametrize("defect", ["no gradient", "slightly off", "of another prompt"])
def test_the_limit_shows_a_wrong_state_after_the_prompt(
    defect: str, in_double: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tree_recurrence.select_states

    def wrong(states: RowStates, chosen: Tensor) -> RowStates:
        carried = right(states, torch.zeros_like(chosen) if defect == "of another prompt" else chosen)
        change = {"no gradient": Tensor.detach, "slightly off": lambda x: x * (1 + 1e-5)}.get(defect, lambda x: x)
        carried.recurrent_states = {i: change(x) for i, x in carried.recurrent_states.items()}
        return carried

    def meddle() -> None:
        monkeypatch.setattr(tree_recurrence, "select_states", wrong)

    assert worst_gradient(in_double("qwen3_5_text"), groups(LONG_ROWS), meddle) > 1e-7


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("qwen3_5_text", "palestra.engine.recurrences.without_padding"),
        ("kimi_linear", "palestra.engine.recurrent._only_convolves"),
    ],
)
def test_states_after_padding_are_noticed_at_load(family: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what, lambda x: x)
    assert Scorer(tiny_model(family)).mode == "reference"


def test_the_shared_prompt_is_computed_once() -> None:
    samples = groups()[:3]
    [shared] = pack(Batch.of(samples), max_tokens=1000)
    apart = pack(Batch.of(samples), max_tokens=1000, share_prefix=False)
    assert len(shared.token_ids) == 11 + (6 + 0 + 11)
    assert sum(len(b.token_ids) for b in apart) == 3 * 11 + (6 + 0 + 11)


def test_a_model_of_an_unknown_recurrence_is_computed_in_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.engine.recurrent.CACHE_ARGUMENTS", ())
    model, samples = tiny_model("qwen3_next"), groups()
    scorer = Scorer(model)
    assert scorer.mode == "reference"
    [batch] = packed(samples, 1000, share_prefix=False)
    with scorer.session():
        got = scorer(batch)
    torch.testing.assert_close(got[0], plain(model, samples, 1.0)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2}, "has linear_attention layers"),
        ("falcon", {}, "does not attend through transformers' attention interface"),
        ("stablelm", {}, "does not hand keywords on"),
    ],
)
def test_a_model_that_cannot_be_packed_is_computed_in_padded_rows(
    family: str, changes: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, samples = tiny_model(family, **changes), groups()
    scorer = Scorer(model)
    assert scorer.mode == "reference"
    assert says in caplog.text
    [batch] = packed(samples, 1000, share_prefix=False)
    with scorer.session():
        got = scorer(batch)
    torch.testing.assert_close(got[0], plain(model, samples, 1.0)[0], rtol=1e-4, atol=1e-4)


def test_an_unknown_change_to_the_logits_is_noticed_and_computed_whole() -> None:
    model = tiny_model("qwen3")

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    model.__class__ = Odd
    scorer, samples = Scorer(model), groups()
    assert scorer.mode == "reference"
    [batch] = packed(samples, 1000, share_prefix=False)
    torch.testing.assert_close(scorer(batch)[0], plain(model, samples, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_the_model_attends_as_before_after_a_session() -> None:
    model = tiny_model("qwen3")
    before = model.config._attn_implementation
    with Scorer(model).session():
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
