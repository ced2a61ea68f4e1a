"""The local learner: one step, its metrics, its failures, and going on after a save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_learner import KeepsGradients, build, loss_of, make_samples, settings
from torch import nn
from torch.nn.functional import cross_entropy

from palestra.algo.batch import Batch
from palestra.algo.step_loss import next_entropy_coefficient
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError, UnreadableFileError
from palestra.core.types import Sample
from palestra.learner.graphs import Graphs
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.learner.micro_batches import MicroBatchLimit
from palestra.learner.shapes import Lengths, Shapes
from palestra.train.update import coefficients_at, learning_rate_at, update


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Steps:
    """The learner, stepped as the loop does it."""

    def __init__(self, model: nn.Module, *, config: RunConfig) -> None:
        self.learner, self.config, self.model = LocalLearner(model, config=config), config, model
        self.steps = self.version = 0
        self.entropy = config.train.entropy_coefficient

    def step(self, samples: list[Sample]) -> dict[str, float]:
        coefficients = coefficients_at(self.steps, self.config, self.config.train.max_steps, self.entropy)
        metrics = update(self.learner, Batch.of(samples), self.config, coefficients, self.version)
        self.steps += 1
        if (target := self.config.train.target_entropy) is not None:
            self.entropy = next_entropy_coefficient(self.entropy, metrics["entropy"], target)
        return metrics


def first_step(config: RunConfig, samples: list[Sample] | None = None) -> tuple[dict[str, float], list[torch.Tensor]]:
    learner = Steps(build(), config=config)
    metrics = learner.step(samples or make_samples())
    return metrics, weights(learner.model)


def test_a_step_reports_what_an_engineer_looks_at() -> None:
    metrics, _ = first_step(settings())
    names = "loss policy_loss entropy clip_fraction_low clip_fraction_high ratio_mean ratio_max kl_sampler grad_norm"
    assert {*names.split(), "learning_rate", "tokens_trained", "train_tokens_per_s", "train_seconds"} <= metrics.keys()
    assert metrics["ratio_max"] == 1.0
    assert metrics["tokens_trained"] == sum(s.policy_mask.sum() for s in make_samples())


def test_learning_raises_the_logprob_of_what_was_rewarded() -> None:
    config = settings(train={"learning_rate": 3e-3})
    learner = Steps(build(), config=config)
    good = [s for s in make_samples() if s.advantages[0] >= 0]

    def mean_logprob() -> float:
        ids = torch.tensor([good[1].token_ids.tolist()])
        logp = torch.log_softmax(learner.model(ids).logits[0, :-1], -1)
        return logp.gather(-1, ids[0, 1:, None]).mean().item()

    before = mean_logprob()
    for _ in range(10):
        learner.step(make_samples(learner.version))
        learner.version += 1
    assert mean_logprob() > before + 0.5


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo"])
def test_the_size_of_micro_batches_changes_nothing(loss: str) -> None:
    whole, one = first_step(settings(train={"loss": loss}, echo={"coefficient": 0.1}))
    parts, two = first_step(settings(train={"loss": loss, "tokens_per_micro_batch": 20}, echo={"coefficient": 0.1}))
    for name in ("loss", "policy_loss", "echo_loss", "grad_norm", "entropy"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 * 0.2)


def test_micro_batches_are_padded_also_when_graphs_had_to_give_their_memory_back() -> None:
    learner = Steps(build(), config=settings()).learner
    learner._shapes = Shapes(10_000)
    graphs = learner._scorer.graphs = Graphs(learner.model, learner._scorer._run_layers)
    shapes = []
    for change in (lambda: None, graphs.forget, lambda: setattr(graphs, "pads", False)):
        change()
        packed = learner._packed(Batch.of(make_samples()), echo=False)
        shapes += [micro.layout.bounds.shape for micro in packed]
    assert shapes[0] is not None
    assert shapes == [shapes[0], shapes[0], None]


@pytest.mark.parametrize("change", [{"train": {"share_prefix": False}}, {"model": {"gradient_checkpointing": True}}])
def test_sharing_the_prompt_and_gradient_checkpointing_change_nothing(change: dict[str, Any]) -> None:
    usual, one = first_step(settings())
    other, two = first_step(settings(**change))
    assert other["grad_norm"] == pytest.approx(usual["grad_norm"], rel=1e-5)
    if "model" in change:
        assert same(one, two)
    else:
        assert usual["tokens_computed"] < other["tokens_computed"]


@pytest.mark.parametrize("echo", [0.0, 0.3])
@pytest.mark.parametrize("budget", [16384, 160])
def test_a_common_beginning_is_computed_once_for_each_micro_batch(budget: int, echo: float) -> None:
    samples = make_samples(groups=4, beginning=80)
    found = []
    for share in (True, False):
        changes = {"share_prefix": share, "tokens_per_micro_batch": budget}
        config = settings(train=changes, echo={"coefficient": echo})
        learner = KeepsGradients(build(), config=config)
        coefficients = coefficients_at(0, config, None, 0.0)
        metrics = update(learner, Batch.of(samples), config, coefficients, version=0)
        found.append((metrics, learner.taken[0]))
    (ours, mine), (plain, theirs) = found
    assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4, abs=1e-6)
    behind = sum(5 + group + sum(7 + 2 * sibling - 1 for sibling in range(3)) for group in range(4))
    assert ours["tokens_computed"] == behind + 80 * 2  # a micro-batch for each part, or by the budget
    assert plain["tokens_computed"] == sum(len(sample.token_ids) - 1 for sample in samples)


@pytest.mark.parametrize("mode", ["trees", "reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_echo_term_is_the_cross_entropy_on_tool_results(temperature: float, mode: str) -> None:
    """Of the model's own distribution, whatever the temperature that its answers are sampled with."""
    samples = make_samples()
    config = settings(
        echo={"coefficient": 0.05}, rollout={"temperature": temperature}, train={"share_prefix": mode == "trees"}
    )
    learner = Steps(build(), config=config)
    learner.learner._scorer.mode = mode
    metrics = learner.step(samples)
    assert metrics["policy_loss"] == pytest.approx(
        first_step(settings(rollout={"temperature": temperature}))[0]["loss"]
    )
    model, total, count = build(), 0.0, 0
    for sample in samples:
        ids = torch.tensor([sample.token_ids.tolist()])
        logp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        observed = torch.tensor(sample.echo_mask.tolist())[1:]
        total -= logp[observed].sum().item()
        count += int(observed.sum())
    assert metrics["echo_loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 0.05 * metrics["echo_loss"], rel=1e-6)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [24, 16384])
def test_demonstrations_are_learned_by_plain_cross_entropy(budget: int, share: bool) -> None:
    """Of the model's own distribution, whatever the temperature of its attempts; the log-probabilities are unknown."""
    samples = [
        replace(s, advantages=np.ones_like(s.advantages), logprobs=np.where(s.policy_mask, np.nan, s.logprobs))
        for s in make_samples()
    ]
    train = {"loss": "cross_entropy", "tokens_per_micro_batch": budget, "share_prefix": share}
    config = settings(rollout={"temperature": 0.7}, train=train)
    learner = KeepsGradients(build(), config=config)
    metrics = update(learner, Batch.of(samples), config, coefficients_at(0, config, None, 0.0), 0)
    model, losses = build(), []
    for sample in samples:
        ids, trained = torch.tensor([sample.token_ids.tolist()]), torch.tensor(sample.policy_mask.tolist())[1:]
        losses.append(cross_entropy(model(ids).logits[0, :-1][trained], ids[0, 1:][trained], reduction="none"))
    expected = torch.cat(losses).mean()
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(learner.taken, [gradient], rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo"])
def test_rows_that_only_echo_learns_from_leave_the_policy_term_alone(loss: str) -> None:
    config = settings(train={"loss": loss}, echo={"coefficient": 0.05})
    samples = make_samples()
    others = [replace(s, policy_mask=s.policy_mask & False, group=s.group + 2) for s in make_samples(seed=1)]
    alone, _ = first_step(config, samples)
    both, _ = first_step(config, samples + others)
    assert both["policy_loss"] == pytest.approx(alone["policy_loss"], rel=1e-5)
    assert both["echo_loss"] != pytest.approx(alone["echo_loss"], rel=1e-3)
    nothing_else, changed = first_step(config, others)
    assert nothing_else["policy_loss"] == 0.0
    assert not same(changed, weights(build()))


def test_a_vanishing_echo_leaves_the_policy_term_alone() -> None:
    without, one = first_step(settings())
    with_echo, two = first_step(settings(echo={"coefficient": 1e-12}))
    assert with_echo["policy_loss"] == without["policy_loss"]
    assert with_echo["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-6)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_several_passes_measure_the_ratio_against_the_first() -> None:
    metrics, _ = first_step(settings(train={"iterations": 3, "learning_rate": 1e-2}))
    assert metrics["ratio_max"] > 1.01
    split, _ = first_step(settings(train={"minibatches": 2, "learning_rate": 1e-2}))
    assert split["ratio_max"] > 1.001  # the second minibatch meets weights that the first one moved


def test_stale_rows_are_compared_with_the_policy_that_made_them() -> None:
    metrics, _ = first_step(settings(), make_samples(version=7))
    assert metrics["ratio_max"] != 1.0  # the sampler's logprobs were -4.0


@pytest.mark.parametrize("lora", [0, 4])
def test_the_reference_is_the_model_as_it_was_or_the_disabled_adapter(lora: int) -> None:
    config = settings(train={"beta": 0.1, "learning_rate": 1e-2}, lora={"r": lora, "dropout": 0.0})
    learner = Steps(add_lora(build(), config.lora) if lora else build(), config=config)
    frozen = [p.detach().clone() for p in learner.model.parameters() if not p.requires_grad]
    assert learner.step(make_samples())["kl_reference"] == pytest.approx(0.0, abs=1e-7)
    assert learner.step(make_samples())["kl_reference"] > 1e-6
    assert same(frozen, [p.detach() for p in learner.model.parameters() if not p.requires_grad])


def test_other_work_is_done_once_a_step_is_on_its_way() -> None:
    learner, samples, seen = LocalLearner(build(), config=settings()), make_samples(), list[bool]()
    before = weights(learner.model)
    learner.forward_backward(Batch.of(samples), loss_of(samples))
    learner.optim_step(0.1, max_grad_norm=1.0, host_work=lambda: seen.append(same(before, weights(learner.model))))
    assert seen == [True]  # a CPU has nothing to wait for: the update comes after it
    assert not same(before, weights(learner.model))
    assert learner.optim_step(0.1, max_grad_norm=1.0, host_work=lambda: seen.append(False)) == 0.0
    assert seen == [True]  # without a gradient there is no step


def test_other_work_that_fails_leaves_no_gradient_behind() -> None:
    learner, samples = LocalLearner(build(), config=settings()), make_samples()
    before = weights(learner.model)
    learner.forward_backward(Batch.of(samples), loss_of(samples))

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        learner.optim_step(0.1, max_grad_norm=1.0, host_work=fail)
    assert learner.optim_step(0.1, max_grad_norm=1.0) == 0.0
    assert all(weight.grad is None for weight in learner.model.parameters())
    assert same(before, weights(learner.model))


def test_the_entropy_controller_raises_the_bonus_while_entropy_is_low() -> None:
    config = settings(train={"target_entropy": 100.0})
    learner = Steps(build(), config=config)
    learner.step(make_samples())
    assert learner.entropy > 0
    with_bonus = learner.step(make_samples())
    assert with_bonus["loss"] < with_bonus["policy_loss"]


def test_a_step_with_nothing_to_learn_moves_the_schedules_on() -> None:
    config = settings(train={"learning_rate": 1e-2, "scheduler": "linear", "max_steps": 4})
    learner = Steps(build(), config=config)
    rates = [learner.step(make_samples())["learning_rate"]]
    learner.steps += 1  # as the loop counts a step without signal
    rates.append(learner.step(make_samples())["learning_rate"])
    assert rates == [learning_rate_at(0, config.train, 4), learning_rate_at(2, config.train, 4)]
    assert rates[1] < rates[0]


@pytest.mark.parametrize("kind", ["lora", "master weights"])  # tests/contract has the others
def test_a_saved_learner_goes_on_with_the_same_bits_schedules_and_entropy_bonus(kind: str, tmp_path: Path) -> None:
    train = {"learning_rate": 1e-2, "scheduler": "cosine", "max_steps": 6, "target_entropy": 2.0}
    lora = kind == "lora"
    config = settings(train=train, **({"lora": {"r": 4}} if lora else {"model": {"master_weights": True}}))

    def fresh() -> Steps:
        return Steps(add_lora(build(), config.lora) if lora else build(torch.bfloat16), config=config)

    def go_on(learner: Steps, steps: int) -> list[dict[str, float]]:
        timed = ("train_seconds", "train_tokens_per_s", "peak_memory_gib")
        found = []
        for _ in range(steps):
            metrics = learner.step(make_samples(learner.version, seed=learner.steps))
            learner.version += 1
            found.append({k: v for k, v in metrics.items() if k not in timed})
        return found

    straight = fresh()
    torch.manual_seed(5)
    go_on(straight, 2)
    straight.learner.save(tmp_path)
    done = straight.steps, straight.version, straight.entropy  # what the loop keeps in state.json
    expected = go_on(straight, 3)

    resumed = fresh()
    torch.manual_seed(99)
    resumed.learner.load(tmp_path)
    resumed.steps, resumed.version, resumed.entropy = done
    assert go_on(resumed, 3) == expected
    assert same(weights(straight.model), weights(resumed.model))
    saved = {p.name for p in tmp_path.iterdir()}
    assert ("adapter_model.safetensors" in saved, "model.safetensors" in saved) == (lora, not lora)


@pytest.mark.parametrize("file", ["learner.pt", "model.safetensors"])
def test_a_checkpoint_with_a_missing_or_corrupt_file_is_refused_by_name(file: str, tmp_path: Path) -> None:
    config = settings()
    learner = Steps(build(), config=config)
    learner.learner.save(tmp_path)
    (tmp_path / file).write_bytes(b"not a checkpoint at all")
    with pytest.raises(UnreadableFileError, match=file):
        LocalLearner(build(), config=config).load(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(UnreadableFileError, match=f"{file} is missing"):
        LocalLearner(build(), config=config).load(tmp_path)


def test_master_weights_keep_updates_that_bfloat16_would_lose() -> None:
    learner = Steps(build(torch.bfloat16), config=settings(train={"learning_rate": 1e-6}))  # they are the default
    masters = [m.clone() for m in learner.learner.optimizer.masters]
    learner.step(make_samples())
    moved = [not torch.equal(a, b) for a, b in zip(masters, learner.learner.optimizer.masters, strict=True)]
    assert all(moved)
    for weight, master in zip(learner.learner.optimizer.weights, learner.learner.optimizer.masters, strict=True):
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_lora_without_an_adapter_is_refused() -> None:
    with pytest.raises(SettingError, match="add_lora"):
        LocalLearner(build(), config=settings(lora={"r": 4}))


def test_the_learner_leaves_the_callers_model_mode_alone() -> None:
    config = settings()
    model = build().eval()
    Steps(model, config=config).step(make_samples())
    assert not model.training


def test_a_resumed_learner_pads_and_divides_as_before(tmp_path: Path) -> None:
    first, second = (LocalLearner(build(), config=settings()) for _ in range(2))
    lengths = Lengths(([], [100, 90], [30, 40, 50, 10], []), [70, 60])
    for learner in (first, second):
        learner._shapes = Shapes(10_000)
    first._limit = MicroBatchLimit(123)
    known = first._shapes.fit(lengths)
    first.save(tmp_path)
    second.load(tmp_path)
    smaller = Lengths(([], [90], [30, 40], []), [70])
    assert known is not None
    assert second._shapes.fit(smaller)[0] == known[0]  # a learner that has not met it would make a smaller one
    assert Shapes(10_000).fit(smaller)[0] != known[0]
    assert second._limit.tokens == 123
