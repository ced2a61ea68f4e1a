"""What every learner promises, whatever computes its gradients. A new learner is one more entry in `LEARNERS`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from small_learner import loss_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.algo.batch import Batch
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.errors import NotFiniteError, PalestraError, SettingError
from palestra.core.types import Array, Sample
from palestra.core.weights import Weights
from palestra.learner.base import Learner
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.policy.local import load_weights

VOCABULARY = 64
RATE = 1e-2
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BASE = {"train": {"tokens_per_micro_batch": 64}}


def model_of(family: str, **extra: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **extra), dtype=torch.float32)


@dataclass
class Case:
    """A kind of learner: how its model is made, trained, and loaded again from what it exports."""

    base: Callable[[], Any]  # the model without adapters
    sections: dict[str, Any]
    temperature = 0.8
    has_entropy = has_dropout = True

    def config(self, **sections: Any) -> RunConfig:
        settings = {"rollout": {"temperature": self.temperature, "max_new_tokens": 16}}
        return RunConfig.build(settings, BASE, self.sections, sections)

    @contextmanager
    def serving(self, tokenizer: Any, folder: Path) -> Iterator[None]:
        """What its learners need around them."""
        yield

    def model(self, **sections: Any) -> Any:
        """The model as it was before any step."""
        lora = self.config(**sections).lora
        return add_lora(self.base(), lora) if lora.r else self.base()

    def learner(self, **sections: Any) -> Learner:
        return LocalLearner(self.model(**sections), config=self.config(**sections))

    def exported(self, folder: Path) -> Any:
        if self.config().lora.r:
            return PeftModel.from_pretrained(self.base(), folder)
        return AutoModelForCausalLM.from_pretrained(folder)


class OnTinkerServer(Case):
    """By the official SDK, on our own server in a thread. Each learner is a model of its own there."""

    temperature = 1.0
    has_entropy = has_dropout = False

    @contextmanager
    def serving(self, tokenizer: Any, folder: Path) -> Iterator[None]:
        pytest.importorskip("tinker")
        from tinker_server import base_model, tinker_server

        self.served = base_model(self.base(), tokenizer, "random")
        self.opened: list[Any] = []
        with tinker_server([self.served], folder) as running:
            self.url = running.url
            yield
            for opened in self.opened:
                opened.close(good=True)

    def model(self, **sections: Any) -> Any:
        from palestra.extras.tinker.server.base_model import AdapterSpec

        return self.served.module(AdapterSpec(self.config().lora.r))

    def learner(self, **sections: Any) -> Learner:
        from palestra.extras.tinker.client.backend import open_model
        from palestra.extras.tinker.client.learner import TinkerLearner

        settings = {"backend": "tinker", "tinker": {"base_url": self.url}, "model": {"name": "random"}}
        config = self.config(**settings, **sections)
        self.opened.append(open_model(config))
        return TinkerLearner(self.opened[-1], config=config)


LEARNERS: dict[str, Case] = {
    "full": Case(lambda: model_of("qwen3", head_dim=8), {}),
    "lora": Case(lambda: model_of("qwen3", head_dim=8), {"lora": {"r": 4, "dropout": 0.0}}),
    # its layers carry a state from token to token, so rows are computed apart, padded
    "padded": Case(lambda: model_of("lfm2", full_attn_idxs=[1]), {}),
}
if os.environ.get("PALESTRA_TEST_SLOW"):  # make test-tinker
    LEARNERS["tinker"] = OnTinkerServer(lambda: model_of("qwen3", head_dim=8), {"lora": {"r": 4}})


@pytest.fixture(params=LEARNERS)
def case(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: Any) -> Iterator[Case]:
    found = LEARNERS[request.param]
    with found.serving(tiny_tokenizer, tmp_path_factory.mktemp("tinker")):
        yield found


def rows(count: int = 8, seed: int = 0) -> list[Sample]:
    """Siblings of unlike lengths in groups of four, each with a tool result (tokens 3 and 4) among its own tokens."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(n)]

    samples = []
    for i in range(count):
        if i % 4 == 0:
            prompt = tokens(5 + i)
        n = 7 + i % 4
        policy = [False] * len(prompt) + [j not in (3, 4) for j in range(n)]
        echo = [False] * len(prompt) + [j in (3, 4) for j in range(n)]
        logprobs = [-4.0 if by_model else 0.0 for by_model in policy]
        ids = prompt + tokens(n)
        samples.append(Sample(ids, policy, echo, logprobs, i % 4 - 1.5, i // 4, len(prompt)))  # type: ignore[arg-type]
    return samples


def step(learner: Learner, batches: Sequence[Batch], loss: StepLoss) -> tuple[float, list[dict[str, float]]]:
    """One optimizer step: the gradient's norm, and each batch's metrics."""
    outputs = [learner.forward_backward(batch, loss) for batch in batches]
    norm = learner.optim_step(RATE, max_grad_norm=1.0)
    return norm, [found.metrics() for found in outputs]


def steps(learner: Learner, seeds: Sequence[int]) -> list[float]:
    """One step for each seed; the norms."""
    return [step(learner, [Batch.of(samples)], loss_of(samples))[0] for samples in (rows(4, seed) for seed in seeds)]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights(0).tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_update(one: Learner, other: Learner, before: dict[str, torch.Tensor]) -> None:
    """AdamW's first step goes by the gradient's sign, so where it is near 0 rounding may turn it around: rarely."""
    first, second = weights(one), weights(other)
    moved = sum(float((first[name] - before[name]).abs().sum()) for name in before)
    apart = sum(float((first[name] - second[name]).abs().sum()) for name in before)
    assert apart < 2e-3 * moved


@torch.no_grad()
def own_logprobs(model: nn.Module, samples: Sequence[Sample], temperature: float) -> Array:
    """[T] from the model's own logits, row by row; NaN where no loss reads."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids.tolist()])
        logp = torch.log_softmax(model.eval()(ids, use_cache=False).logits[0, :-1] / temperature, -1)
        row = np.full(len(sample.token_ids), np.nan, dtype=np.float32)
        row[1:] = logp.gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()
        found.append(np.where(sample.policy_mask, row, np.nan))
    return np.concatenate(found)


def assert_close(one: Array, other: Array, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(one, other, atol=tolerance, rtol=0, equal_nan=True)


SPLITS = {"halves": [slice(0, 4), slice(4, 8)], "across groups": [slice(0, 8, 2), slice(1, 8, 2)]}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo", "vespo"])
def test_the_gradient_of_eight_rows_is_that_of_two_times_four(case: Case, loss: str, split: str) -> None:
    samples = rows(8)
    whole, parts = case.learner(), case.learner()
    before = weights(whole)
    entropy = 0.02 if case.has_entropy else 0.0
    terms = loss_of(
        samples, loss, echo_coefficient=0.1, entropy_coefficient=entropy, echo_normalization="sequence_mean"
    )
    norm, [metrics] = step(whole, [Batch.of(samples)], terms)
    half_norm, halves = step(parts, [Batch.of(samples[part]) for part in SPLITS[split]], terms)
    assert norm > 0
    assert half_norm == pytest.approx(norm, rel=1e-4)
    for name in ("loss", "policy_loss", "echo_loss"):  # shares of one loss
        assert sum(half[name] for half in halves) == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
    assert_same_update(whole, parts, before)


def test_an_optimizer_step_without_gradients_changes_nothing(case: Case) -> None:
    learner = case.learner(train={"weight_decay": 0.1})
    before = weights(learner)
    assert learner.optim_step(RATE, max_grad_norm=1.0) == 0.0
    assert same(before, weights(learner))
    steps(learner, [0])
    moved = weights(learner)
    assert not same(before, moved)
    assert learner.optim_step(RATE, max_grad_norm=1.0) == 0.0  # the gradient was forgotten
    masked = [replace(s, policy_mask=np.zeros(len(s.token_ids), dtype=bool)) for s in rows(4)]
    assert step(learner, [Batch.of(masked)], loss_of(masked))[0] == 0.0
    assert same(moved, weights(learner))


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        (float("nan"), "group 1: the loss is nan"),
        (float("inf"), "group 1: the loss is -?(inf|nan)"),
        (3e38, "group 1: the gradient norm is (inf|nan)"),  # the weighted loss is still finite
    ],
)
def test_a_loss_that_is_not_finite_raises_names_its_group_and_leaves_the_weights(
    case: Case, advantage: float, words: str
) -> None:
    learner, untouched = case.learner(), case.learner()
    before, good = weights(learner), rows(8)
    bad = [*good[:5], replace(good[5], advantages=advantage), *good[6:]]  # type: ignore[arg-type]
    terms = loss_of(bad, "luspo")
    learner.forward_backward(Batch.of(bad[:4]), terms)
    with pytest.raises(NotFiniteError, match=words):  # at the latest by the step
        step(learner, [Batch.of(bad[4:])], terms)
    assert same(before, weights(learner))
    assert steps(learner, [1, 2]) == steps(untouched, [1, 2])  # and nothing of it is left
    assert same(weights(untouched), weights(learner))


def test_a_batch_that_cannot_be_computed_leaves_no_gradient_behind(case: Case) -> None:
    learner, untouched = case.learner(), case.learner()
    good = rows(8)
    ids = good[7].token_ids.copy()
    ids[2] = VOCABULARY  # in the second micro-batch; the first has its gradient by then
    bad = [*good[:7], replace(good[7], token_ids=ids, prompt_length=0)]
    with pytest.raises((IndexError, PalestraError)):  # at the latest by the step
        step(learner, [Batch.of(bad)], loss_of(bad))
    assert learner.optim_step(RATE, max_grad_norm=1.0) == 0.0
    assert steps(learner, [1, 2]) == steps(untouched, [1, 2])
    assert same(weights(untouched), weights(learner))


def test_forward_gives_the_logprobs_that_forward_backward_found_and_the_models_own(case: Case) -> None:
    learner, samples = case.learner(), rows(8)
    steps(learner, [3])
    expected = learner.forward(Batch.of(samples))
    copy = case.model()
    load_weights(copy, learner.weights(1))
    assert_close(expected, own_logprobs(copy, samples, case.temperature))
    outputs = learner.forward_backward(Batch.of(samples), loss_of(samples))
    learner.optim_step(RATE, max_grad_norm=1.0)
    assert_close(outputs.logprobs(), expected)  # those of before the step, asked for after it
    moved = learner.forward(Batch.of(samples))
    assert np.nanmax(np.abs(moved - expected)) > 1e-3


def test_logprobs_of_tool_results_come_with_the_echo_term(case: Case) -> None:
    learner, samples = case.learner(), rows(4)
    found = learner.forward_backward(Batch.of(samples), loss_of(samples, echo_coefficient=0.1)).logprobs()
    batch = Batch.of(samples)
    assert (np.isfinite(found) == (batch.policy_mask | batch.echo_mask)).all()


def test_reference_logprobs_stay_those_of_the_beginning(case: Case) -> None:
    learner, samples = case.learner(train={"beta": 0.1}), rows(8)
    first = learner.forward(Batch.of(samples), reference=True)
    assert_close(first, own_logprobs(case.model(), samples, case.temperature))
    assert_close(first, learner.forward(Batch.of(samples)))
    steps(learner, [1, 2])
    assert_close(learner.forward(Batch.of(samples), reference=True), first, tolerance=0.0)
    now = learner.forward(Batch.of(samples))
    assert np.nanmax(np.abs(now - first)) > 1e-3


def test_a_reference_that_was_not_asked_for_is_refused(case: Case) -> None:
    with pytest.raises(SettingError, match=r"train\.beta > 0"):
        case.learner().forward(Batch.of(rows(4)), reference=True)


def test_weights_make_a_second_model_the_same(case: Case, tmp_path: Path) -> None:
    learner, samples = case.learner(), rows(4)
    steps(learner, [1, 2])
    given = learner.weights(7)
    assert given.version == 7
    expected = learner.forward(Batch.of(samples))
    for name, carried in {
        "tensors": Weights(7, given.tensors),
        "file": Weights.load(given.save(tmp_path / "weights.safetensors")),
    }.items():
        assert carried.version == 7
        copy = case.model()
        if name == "tensors":  # there was something to load
            assert np.nanmax(np.abs(own_logprobs(copy, samples, case.temperature) - expected)) > 1e-3
        load_weights(copy, carried)
        assert_close(own_logprobs(copy, samples, case.temperature), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_saved_learner_goes_on_with_the_same_bits(case: Case, dropout: float, tmp_path: Path) -> None:
    changes = {"lora": {"r": 4, "dropout": dropout}} if case.config().lora.r and case.has_dropout else {}
    learner = case.learner(**changes)
    torch.manual_seed(5)
    steps(learner, [1, 2])
    learner.save(tmp_path)
    expected = steps(learner, [3, 4])

    resumed = case.learner(**changes)
    torch.manual_seed(99)
    resumed.load(tmp_path)
    assert steps(resumed, [3, 4]) == expected
    assert same(weights(learner), weights(resumed))


def test_what_is_exported_is_loaded_by_others(case: Case, tmp_path: Path) -> None:
    learner, samples = case.learner(), rows(4)
    steps(learner, [1, 2])
    folder = learner.export(tmp_path / "out")
    assert_close(own_logprobs(case.exported(folder), samples, case.temperature), learner.forward(Batch.of(samples)))
    assert not (folder / "learner.pt").exists()


def nan_like(samples: Sequence[Sample]) -> list[Array]:
    return [np.full(len(s.token_ids), np.nan, dtype=np.float32) for s in samples]


def test_old_logprobs_that_are_not_known_are_the_current_policys_own(case: Case) -> None:
    samples = rows(4)
    one, other = case.learner(), case.learner()
    before, terms = weights(one), loss_of(samples)
    norm, [metrics] = step(one, [Batch.of(samples)], terms)
    unknown_norm, [unknown] = step(other, [Batch.of(samples, old_logprobs=nan_like(samples))], terms)
    assert unknown_norm == pytest.approx(norm, rel=1e-6)
    assert unknown["loss"] == pytest.approx(metrics["loss"], abs=1e-7)
    assert metrics["ratio_max"] == unknown["ratio_max"] == 1.0
    assert_same_update(one, other, before)


def test_old_logprobs_are_known_token_by_token(case: Case) -> None:
    samples = rows(4)
    learner = case.learner()
    own = learner.forward(Batch.of(samples))
    even = np.arange(len(own)) % 2 == 0
    batch = Batch.of(samples)
    batch.old_logprobs = np.where(even, own - 0.1, np.nan)  # a behaviour policy that was less sure: the ratio is e^0.1
    _, [metrics] = step(learner, [batch], loss_of(samples))
    share = even[np.isfinite(own)].mean()
    assert metrics["ratio_max"] == pytest.approx(np.exp(0.1), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.0 + share * (np.exp(0.1) - 1.0), rel=1e-4)


def test_sampler_logprobs_that_are_not_known_are_the_current_policys_own(case: Case) -> None:
    samples = [replace(s, logprobs=np.where(s.policy_mask, np.nan, 0.0)) for s in rows(4)]
    _, [metrics] = step(case.learner(), [Batch.of(samples)], loss_of(samples))
    assert metrics["kl_sampler"] == metrics["sampler_gap_max"] == 0.0
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_a_row_with_several_advantages_has_the_gradient_of_the_sum_of_its_parts(case: Case, loss: str) -> None:
    [row] = rows(1)
    places = np.arange(len(row.token_ids))
    early, late = (
        np.where(mask, value, 0.0).astype(np.float32) for mask, value in ((places < 8, 1.5), (places >= 8, -0.5))
    )
    both = replace(row, advantages=early + late)
    terms = loss_of([row], loss)
    one, other, uniform = case.learner(), case.learner(), case.learner()
    before = weights(one)
    norm, [metrics] = step(one, [Batch.of([both])], terms)
    parts_norm, parts = step(other, [Batch.of([replace(row, advantages=part)]) for part in (early, late)], terms)
    assert parts_norm == pytest.approx(norm, rel=1e-4)
    assert sum(part["policy_loss"] for part in parts) == pytest.approx(metrics["policy_loss"], rel=1e-4)
    assert_same_update(one, other, before)
    assert step(uniform, [Batch.of([row])], terms)[0] != pytest.approx(norm, rel=1e-2)
