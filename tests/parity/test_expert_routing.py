"""Experts that the engine records and the learner replays, against the model's own forward over padded rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engine_families import tiny_model
from family_cases import quick_case
from torch import Tensor
from torch.nn import functional as F

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.config_sections import LoraSection
from palestra.core.errors import InputError, UnsupportedModel
from palestra.core.types import Array, Sample, SamplingParams, Turn
from palestra.engine.engine import Engine
from palestra.engine.routing import ExpertRouting
from palestra.learner.forward import Scorer
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.learner.tree_attention import pack_batch
from palestra.train.batch import routing_column

FAMILIES = ["qwen3_moe", "olmoe", "granitemoe", "gpt_oss"]
OTHERS = ["lfm2_moe", "granitemoehybrid", "llama4_text"]
UNKNOWN = 255


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, page_size=4, kv_memory_gib=0.01, self_check=False, record_routing=True, **options)


@torch.no_grad()
def routers_choice(model: Any, ids: Sequence[int]) -> Array:
    """[T, layers, k] by the model's own forward over one row, the experts of each token in order."""
    with ExpertRouting(model).record() as found:
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return np.sort(torch.stack(found, 1).numpy(), axis=-1)


def laid_out(ids: Sequence[int], routings: Sequence[tuple[int, Array | None]]) -> Array:
    """[T, layers, k] of a row, from turns that end at these lengths."""
    known = next(rows for _, rows in routings if rows is not None)
    column = np.full((len(ids), *known.shape[1:]), UNKNOWN, np.uint8)
    for end, rows in routings:
        if rows is not None:
            column[end - 1 - len(rows) : end - 1] = rows
    return np.sort(column, axis=-1)


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_record_is_the_routers_choice_in_forks_branches_and_shared_prefixes(family: str) -> None:
    model = tiny_model(family)
    engine = engine_of(model)
    forks = engine.fork(engine.open(prompt(11)), 3)
    turns = engine.sample(forks, [SamplingParams(7, seed=seed) for seed in range(3)])
    records = [[(len(s.token_ids), turn.routing)] for s, turn in zip(forks, turns, strict=True)]
    engine.append(forks[0], prompt(5, seed=1))
    branch = engine.branch(forks[1], 14)
    alike = engine.open([*prompt(11), *prompt(3, seed=2)])  # begins with the pages of the forks' prompt
    sessions, all_records = [*forks, branch, alike], [*records, [], []]
    later = engine.sample(sessions, [SamplingParams(6, seed=seed) for seed in range(10, 15)])
    for session, record, turn in zip(sessions, all_records, later, strict=True):
        record.append((len(session.token_ids), turn.routing))
        found = laid_out(session.token_ids, record)
        expected = routers_choice(model, session.token_ids)
        assert (found[-1] == UNKNOWN).all()  # the last token was never computed
        np.testing.assert_array_equal(found[:-1], expected[:-1])


def test_preempted_sessions_keep_their_record() -> None:
    model = tiny_model("qwen3_moe")
    engine = engine_of(model)
    pool = engine.pool
    held = pool.take(pool.free - 12)  # room for two of the three sessions
    sessions = [engine.open(prompt(9, seed)) for seed in range(3)]
    turns = engine.sample(sessions, SamplingParams(20, seed=1))
    pool.release(held)
    assert engine.scheduler.dropped_sessions > 0
    for session, turn in zip(sessions, turns, strict=True):
        found = laid_out(session.token_ids, [(len(session.token_ids), turn.routing)])
        np.testing.assert_array_equal(found[:-1], routers_choice(model, session.token_ids)[:-1])


def test_turn_cut_by_a_stop_string_has_no_routing_behind_its_end() -> None:
    model = tiny_model("olmoe")

    class Letters:
        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return "".join(chr(97 + token % 26) for token in ids)

    engine = engine_of(model, tokenizer=Letters())
    session = engine.open(prompt(6))
    [turn] = engine.sample([session], SamplingParams(40, seed=3, stop=("a", "b", "c")))
    assert turn.routing is not None
    assert len(turn.routing) == 6 + len(turn.token_ids) - 1


def test_engine_without_recording_has_no_routing() -> None:
    engine = Engine(tiny_model("qwen3_moe"), page_size=4, kv_memory_gib=0.01, self_check=False)
    [turn] = engine.sample([engine.open([5, 6, 7])], SamplingParams(3))
    assert turn.routing is None


def weights_of(family: str, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of given experts, written out for each family."""
    if family in ("gpt_oss", "granitemoe"):
        return logits.gather(-1, chosen).softmax(-1)
    weights = logits.softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights


@contextmanager
def forced(family: str, model: Any, routing: Array) -> Iterator[None]:
    """Routers that choose what `routing` [T, layers, k] says of a row, by a forward of their own."""
    routers = [getattr(router, "base_layer", router) for router in ExpertRouting(model).modules]  # adapters stay
    for layer, router in enumerate(routers):

        def forward(hidden: Tensor, layer: int = layer, router: Any = router) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
            own = logits.topk(routing.shape[-1]).indices
            given = torch.from_numpy(routing[:, layer].astype(np.int64))
            chosen = torch.where(given == UNKNOWN, own, given)
            weights = weights_of(family, router, logits, chosen)
            return (chosen, weights, logits) if family == "granitemoe" else (logits, weights, chosen)

        router.__dict__["forward"] = forward
    try:
        yield
    finally:
        for router in routers:
            del router.__dict__["forward"]


def sampled_groups() -> tuple[list[Sample], list[Array]]:
    """Two groups with shared prompts and random experts; one tool result and the last tokens have unknown ones."""
    generator = np.random.default_rng(0)
    samples, routings = [], []
    for group, (prompt_length, lengths) in enumerate([(9, (7, 2, 12)), (6, (5, 4))]):
        opening = generator.integers(3, 128, prompt_length)
        of_opening = random_experts(generator, prompt_length)
        for count in lengths:
            ids = np.concatenate([opening, generator.integers(3, 128, count)])
            trained = np.arange(len(ids)) >= prompt_length
            trained[prompt_length + 3 : prompt_length + 5] = False
            nothing, zeros = np.zeros(len(ids), bool), np.zeros(len(ids), np.float32)
            samples.append(Sample(ids, trained, nothing, zeros - 1.0, 1.0 - 0.5 * (count % 3), group, prompt_length))
            routing = np.concatenate([of_opening, random_experts(generator, count)])
            routing[prompt_length + 3 : prompt_length + 5] = UNKNOWN
            routing[-1] = UNKNOWN
            routings.append(routing)
    return samples, routings


def random_experts(generator: Any, count: int) -> Array:
    """[count, 3 layers, 2 of 4 experts]."""
    return generator.permuted(np.tile(np.arange(4, dtype=np.uint8), (count, 3, 1)), axis=-1)[..., :2]


def reference(family: str, model: Any, samples: Sequence[Sample], routings: Sequence[Array]) -> list[Tensor]:
    """Log-probabilities of the trained tokens, one row at a time."""
    found = []
    for sample, routing in zip(samples, routings, strict=True):
        ids = torch.tensor(sample.token_ids.tolist())
        with forced(family, model, routing):
            logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logp.gather(-1, ids[1:, None])[:, 0][torch.tensor(sample.policy_mask.tolist())[1:]])
    return found


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * torch.linspace(-1.0, 2.0, len(logprobs))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(found[name] / scale, gradient / scale, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", [*map(quick_case, FAMILIES)])
@pytest.mark.parametrize("variant", ["full", "lora", "checkpointing", "padded"])
def test_replay_computes_the_sampled_experts_forward_and_backward(family: str, variant: str) -> None:
    model, (samples, routings) = tiny_model(family), sampled_groups()
    if variant == "lora":
        model = add_lora(model, LoraSection(r=4, target_modules=["all-linear", "experts"]))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.05)
    if variant == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = torch.cat(reference(family, model, samples, routings))
    theirs = gradients(model, expected)
    own_choice = torch.cat(reference(family, model, samples, [np.full_like(r, UNKNOWN) for r in routings]))
    assert (expected - own_choice).abs().max() > 0.01
    scorer = Scorer(model, routing="replay", mode="reference" if variant == "padded" else None)
    share = scorer.shares_prefix
    assert share == (variant != "padded")
    batch = Batch.of(samples, routing=routings)
    options = {"max_tokens": 1000, "share_prefix": share, "echo": False, "device": torch.device("cpu")}
    with scorer.session(training=variant == "checkpointing" or None):
        found = torch.cat([scorer(micro)[0] for micro in pack_batch(batch, **options)])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert_close(gradients(model, found), theirs)
    assert not any("forward" in module.__dict__ for module in ExpertRouting(model).modules)


def config_of(mode: str, **settings: Any) -> RunConfig:
    return RunConfig.build({"train.expert_routing": mode, "train.learning_rate": 1e-3} | settings).with_step_size()


def metrics_of(learner: LocalLearner, batch: Batch) -> dict[str, float]:
    outputs = learner.forward_backward(batch, StepLoss.of(batch, Objective("grpo"), max_completion_length=16))
    learner.discard_gradients()
    return outputs.metrics()


def sampled_batch(model: Any) -> Batch:
    """Two turns of four siblings, by the engine."""
    engine = engine_of(model)
    sessions = engine.fork(engine.open(prompt(10)), 4)
    first = engine.sample(sessions, [SamplingParams(9, seed=seed) for seed in range(4)])
    for session in sessions:
        engine.append(session, prompt(4, seed=9))
    second = engine.sample(sessions, [SamplingParams(6, seed=seed) for seed in range(4)])
    samples, rows = [], []
    for session, *turns in zip(sessions, first, second, strict=True):
        logprobs = np.concatenate([np.zeros(10), turns[0].logprobs, np.zeros(4), turns[1].logprobs])
        samples.append(Sample(session.token_ids, logprobs < 0, logprobs > 0, logprobs, 1.0, 0, 10))  # type: ignore[arg-type]
        rows.append((Turn("template", prompt(10)), turns[0], Turn("environment", prompt(4, seed=9)), turns[1]))  # type: ignore[arg-type]
    batch = Batch.of(samples)
    batch.sampled["routing"] = routing_column(rows)
    return batch


@pytest.mark.parametrize("family", [*map(quick_case, [*FAMILIES, "lfm2_moe"])])
def test_mismatch_is_0_with_the_samplers_weights_and_above_after_a_change_of_the_routers(family: str) -> None:
    model = tiny_model(family)
    batch = sampled_batch(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for router in ExpertRouting(changed).modules:
            router.weight.add_(torch.randn(router.weight.shape) * 0.3)  # type: ignore[operator,arg-type]
    compare, replay = (LocalLearner(model, config=config_of(mode)) for mode in ("compare", "replay"))
    temperature = {"rollout.temperature": 1.0}
    for learner in (compare, replay):
        assert metrics_of(learner, batch)["routing_mismatch"] == 0.0
    exact = LocalLearner(model, config=config_of("replay", **temperature))
    assert metrics_of(exact, batch)["sampler_gap_max"] < 1e-4
    own, forced_ = (LocalLearner(changed, config=config_of(mode, **temperature)) for mode in ("compare", "replay"))
    assert metrics_of(own, batch)["routing_mismatch"] > 0.01
    assert metrics_of(forced_, batch)["sampler_gap_mean"] < metrics_of(own, batch)["sampler_gap_mean"]


def test_reference_of_adapters_chooses_its_own_experts() -> None:
    model = add_lora(tiny_model("qwen3_moe"), LoraSection(r=4))
    samples, routings = sampled_groups()
    learner = LocalLearner(model, config=config_of("replay", **{"train.beta": 0.1, "lora.r": 4}))
    own, replayed = Batch.of(samples), Batch.of(samples, routing=routings)
    np.testing.assert_allclose(learner.forward(replayed, reference=True), learner.forward(own, reference=True))
    assert np.nanmax(np.abs(learner.forward(replayed) - learner.forward(own))) > 0.01


def test_routing_of_another_model_is_an_error() -> None:
    samples, routings = sampled_groups()
    batch = Batch.of(samples, routing=[routing[:, :2] for routing in routings])
    learner = LocalLearner(tiny_model("qwen3_moe"), config=config_of("replay"))
    with pytest.raises(InputError, match="layers"):
        learner.forward(batch)


def test_dense_model_rejects_routing() -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match=r"train\.expert_routing"):
        engine_of(model)
    with pytest.raises(UnsupportedModel, match=r"train\.expert_routing"):
        LocalLearner(model, config=config_of("compare"))
