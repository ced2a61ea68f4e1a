"""Gradients: the same however they are asked for, and nobody else's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.errors import InputError
from palestra.core.types import Sample
from palestra.extras.tinker.server.base_model import AdapterSpec, BaseModel
from palestra.extras.tinker.server.messages import Datum, Tensor
from palestra.extras.tinker.server.requests import Adam
from palestra.extras.tinker.server.training_model import SETTINGS, TrainingModel
from palestra.learner.local import LocalLearner

SPEC = AdapterSpec(4)
ADAM = Adam(learning_rate=1e-2)
Row = Callable[..., Datum]


def gradients_of(base: BaseModel, data: list[Datum], sizes: list[int], rows_per_pass: int) -> dict[str, torch.Tensor]:
    training_model = TrainingModel(base, SPEC, seed=1, rows_per_pass=rows_per_pass)
    for size in sizes:
        part, data = data[:size], data[size:]
        training_model.forward_backward(part, "importance_sampling", {})
    return training_model.gradient()


@pytest.mark.parametrize(("sizes", "rows_per_pass"), [([4, 4], 4), ([3, 5], 1)])
def test_a_gradient_is_the_same_to_the_bit_however_the_rows_are_split(base, make_row, sizes, rows_per_pass):
    data = [make_row(5 + i, i) for i in range(8)]
    whole = gradients_of(base, data, [8], rows_per_pass)
    parts = gradients_of(base, data, sizes, rows_per_pass)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(bool(gradient.any()) for gradient in whole.values())


@pytest.mark.parametrize("spec", [SPEC, AdapterSpec(0)], ids=["adapter", "all weights"])
@pytest.mark.parametrize("siblings", [1, 4])
def test_a_local_step_has_the_gradient_of_the_server_to_the_bit(base, spec, siblings):
    """The same rows: `dapo` with a step's normalisers on the local learner, `ppo` with weighted advantages here."""
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    for group in range(4):
        prompt, is_new = random.integers(0, 1024, 9), np.arange(17) >= 9
        for _ in range(siblings):
            ids = np.concatenate([prompt, random.integers(0, 1024, 8)])
            logprobs = np.where(is_new, random.uniform(-9, -5, 17), 0.0)
            samples.append(Sample(ids, is_new, np.zeros(17), logprobs, random.normal(), group, 9))  # type: ignore[arg-type]
    batch = Batch.of(samples, old_logprobs=[sample.logprobs for sample in samples])
    loss = replace(StepLoss.of(batch, Objective(loss="dapo"), max_completion_length=8), tokens_total=64.0)

    def answer(column: np.ndarray) -> Tensor:
        return Tensor(column[9:], (16, 1), np.arange(8, 16))

    def row(s: Sample) -> Datum:
        advantages = answer(s.advantages / np.float32(64.0))  # exact: a power of two
        inputs = {"target_tokens": answer(s.token_ids), "logprobs": answer(s.logprobs), "advantages": advantages}
        return Datum(s.token_ids[:-1], inputs)

    data = [row(sample) for sample in samples]
    training_model = TrainingModel(base, spec, seed=1, rows_per_pass=len(data))
    outputs = training_model.forward_backward(data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28})
    model = base.module(spec, 1)
    local = LocalLearner(model, config=RunConfig.build({"rollout.temperature": 1.0}))
    found = local.forward_backward(batch, loss)
    assert np.array_equal(np.concatenate([row[8:, 0] for row in outputs.logprobs]), found.logprobs()[batch.policy_mask])
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert gradients.keys() == training_model.gradient().keys()
    assert all(torch.equal(gradient, training_model.gradient()[name]) for name, gradient in gradients.items())
    assert any(bool(gradient.any()) for gradient in gradients.values())


def test_logprobs_are_the_modules_own_with_a_trained_unembedding(base: BaseModel, make_row: Row) -> None:
    training_model = TrainingModel(base, SPEC, rows_per_pass=4)
    rows = [make_row(9, 1), make_row(4, 2)]
    for _ in range(3):
        training_model.forward_backward(rows, "importance_sampling", {})
        training_model.optim_step(ADAM)
    assert any("lm_head" in name and bool(value.any()) for name, value in training_model.snapshot().items())
    found = training_model.forward_backward(rows, "importance_sampling", {}, backward=False).logprobs
    for row, logprobs in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = training_model._model(input_ids=torch.from_numpy(row.token_ids)[None].long()).logits[0]
        targets = torch.from_numpy(row.inputs["target_tokens"].values)
        expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)


def test_rows_that_begin_alike_give_the_numbers_of_rows_by_themselves(base: BaseModel, make_row: Row) -> None:
    prompt = make_row(12, 1).token_ids
    data = []
    for i, length in enumerate((5, 3, 1, 6)):
        row = make_row(12 + length, i)
        data.append(Datum(np.concatenate([prompt, row.token_ids[12:]]), row.inputs))
    data = [*data[:3], data[2], make_row(7, 9), data[3]]  # one twice, and a stranger between
    together, apart = (TrainingModel(base, SPEC, seed=1, rows_per_pass=rows) for rows in (6, 1))
    outputs = [training_model.forward_backward(data, "importance_sampling", {}) for training_model in (together, apart)]
    for mine, theirs in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    for name, gradient in apart.gradient().items():
        assert torch.allclose(together.gradient()[name], gradient, atol=1e-3, rtol=1e-3)


def test_several_targets_a_position_add_up_like_rows_of_their_own(base: BaseModel, make_row: Row) -> None:
    row = make_row(4, 3)
    random = np.random.default_rng(0)
    targets, weights = random.integers(0, 1024, (4, 2)), random.random((4, 2)).astype(np.float32)

    def with_targets(ids: np.ndarray, values: np.ndarray, cells: np.ndarray | None = None) -> Datum:
        shape = (4, 2) if ids.ndim == 2 or cells is not None else (4,)
        inputs = {
            "target_tokens": Tensor(ids.reshape(-1), shape, cells),
            "weights": Tensor(values.reshape(-1), shape, cells),
        }
        return Datum(row.token_ids, inputs)

    columns = [with_targets(targets[:, k], weights[:, k]) for k in (0, 1)]
    forms = {
        "dense": [with_targets(targets, weights)],
        "sparse": [with_targets(targets.reshape(-1), weights.reshape(-1), np.arange(8))],
        "columns": columns,
    }
    found = {}
    for name, data in forms.items():
        training_model = TrainingModel(base, SPEC, seed=1, rows_per_pass=1)
        outputs = training_model.forward_backward(data, "cross_entropy", {})
        found[name] = (outputs, training_model.gradient())
    logprobs = np.stack(found["columns"][0].logprobs, axis=1)
    for name in ("dense", "sparse"):
        np.testing.assert_allclose(found[name][0].logprobs[0], logprobs, atol=1e-5)
        assert found[name][0].loss == pytest.approx(found["columns"][0].loss, rel=1e-5)
        for key, gradient in found["columns"][1].items():
            assert torch.allclose(found[name][1][key], gradient, atol=1e-4, rtol=1e-3)
    few = with_targets(np.array([7, 8]), np.ones(2, np.float32), np.array([0, 3]))
    looking = TrainingModel(base, SPEC)
    logprobs = looking.forward_backward([few], "cross_entropy", {}, backward=False).logprobs[0]
    assert np.flatnonzero(logprobs).tolist() == [0, 3], "0 in cells that a sparse target leaves out"
    assert looking.gradient() == {}, "and no gradient from looking only"
    assert (looking.optim_step(ADAM), looking.version) == (0.0, 0)


def test_two_adapters_on_one_base_do_not_touch_each_other_or_the_base(base: BaseModel, make_row: Row) -> None:
    before = {name: weight.clone() for name, weight in base._model.named_parameters()}
    alone = TrainingModel(base, SPEC, seed=1)
    alone.forward_backward([make_row(5, 1)], "importance_sampling", {})
    expected = {name: gradient.clone() for name, gradient in alone.gradient().items()}
    first, second = (TrainingModel(base, SPEC, seed=1) for _ in range(2))
    first.forward_backward([make_row(5, 1)], "importance_sampling", {})
    second.forward_backward([make_row(6, 2)], "importance_sampling", {})
    second.optim_step(ADAM)
    assert all(torch.equal(first.gradient()[name], expected[name]) for name in expected)
    first.optim_step(ADAM)
    assert all(torch.equal(weight, before[name]) for name, weight in base._model.named_parameters())


def test_rank_0_trains_all_weights_in_a_copy(base: BaseModel, make_row: Row, tmp_path: Path) -> None:
    whole = TrainingModel(base, AdapterSpec(0))
    kept = base._model.model.embed_tokens.weight.clone()
    whole.forward_backward([make_row(5)], "importance_sampling", {})
    whole.optim_step(ADAM)
    assert not torch.equal(whole.snapshot()["model.embed_tokens.weight"], kept)
    assert torch.equal(base._model.model.embed_tokens.weight, kept)
    whole.save(tmp_path, optimizer=True)
    again = TrainingModel(base, AdapterSpec(0))
    again.load(tmp_path, optimizer=True)
    assert all(torch.equal(value, again.snapshot()[name]) for name, value in whole.snapshot().items())


def test_an_infinite_gradient_changes_nothing_and_is_told(base: BaseModel, make_row: Row) -> None:
    training_model = TrainingModel(base, SPEC)
    before = training_model.snapshot()
    row = make_row(5)
    row.inputs["advantages"].values[3] = 3e38
    row.inputs["logprobs"].values[3] = -50
    training_model.forward_backward([row], "importance_sampling", {})
    with pytest.raises(InputError, match="the weights are unchanged"):
        training_model.optim_step(ADAM)
    assert all(torch.equal(value, before[name]) for name, value in training_model.snapshot().items())
    training_model.forward_backward([make_row(5)], "importance_sampling", {})
    assert training_model.optim_step(ADAM) > 0


def test_rows_without_advantages_are_scored_and_not_gone_back_through(base, make_row, monkeypatch):
    zeros = Tensor(np.zeros(5, np.float32), (5,))
    silent = changed(make_row(5, 2), advantages=zeros)
    expected = TrainingModel(base, SPEC, seed=1)
    alone = expected.forward_backward([make_row(5, 1)], "ppo", SETTINGS["ppo"])
    found = TrainingModel(base, SPEC, seed=1)
    backward, calls = torch.Tensor.backward, []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: [calls.append(1), backward(loss)])
    both = found.forward_backward([make_row(5, 1), silent], "ppo", SETTINGS["ppo"])
    assert len(calls) == 1
    assert both.loss == alone.loss
    assert np.isfinite(both.logprobs[1]).all()
    assert all(torch.equal(gradient, expected.gradient()[name]) for name, gradient in found.gradient().items())
    found.optim_step(ADAM)
    found.forward_backward([silent], "ppo", SETTINGS["ppo"])
    found.optim_step(ADAM)
    assert found.version == 2  # by the momentum of the first


@pytest.fixture(scope="module")
def training_model(base: BaseModel) -> TrainingModel:
    return TrainingModel(base, SPEC)


def changed(row: Datum, **inputs: Tensor | None) -> Datum:
    return Datum(row.token_ids, {k: v for k, v in {**row.inputs, **inputs}.items() if v is not None})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantages": None}, "lacks loss_fn_inputs\\['advantages'\\]"),
        ({"mask": Tensor(np.zeros(5), (5,))}, "does not read"),
        ({"advantages": Tensor(np.zeros(4), (4,))}, "they must agree"),
        ({"advantages": Tensor(np.array([0, 0, np.nan, 0, 0]), (5,))}, "'advantages'\\] holds NaN or infinite"),
        ({"logprobs": Tensor(np.array([0, 0, 0, 0, -np.inf]), (5,))}, "'logprobs'\\] holds NaN or infinite"),
        ({"target_tokens": Tensor(np.array([1, 2, 3, 4, 9999]), (5,))}, "token id 9999 in target_tokens is outside"),
        ({"target_tokens": Tensor(np.array([1, 2]), (2,))}, "5 input tokens and 2 target_tokens"),
        ({"target_tokens": Tensor(np.zeros(5, np.float32), (5,))}, "token ids are integers"),
        ({"target_tokens": Tensor(np.array([1]), (5, 1 << 40), np.array([0]))}, "at most 16777216 are answered"),
    ],
)
def test_a_row_that_cannot_be_computed_is_refused_before_any_is(training_model, make_row, change, words):
    with pytest.raises(InputError, match=words):
        training_model.forward_backward([make_row(5), changed(make_row(5), **change)], "importance_sampling", {})
    assert training_model.gradient() == {}
    assert training_model.optim_step(ADAM) == 0.0
