"""Our losses on a Tinker server have the gradients that they have here; what a server cannot forget is made again."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_learner import loss_of

sys.path.insert(0, str(Path(__file__).parent))

from fake_tinker import VOCABULARY, FakeServer, scored

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.errors import NotFiniteError, UnreadableFileError, UnsupportedError
from palestra.core.types import Array, Sample
from palestra.extras.tinker.client.learner import TinkerLearner, gradient_norm, scored_tokens
from palestra.extras.tinker.client.model import TinkerModel

RNG = np.random.default_rng(0)
CONFIG = RunConfig.build({"backend": "tinker", "train.beta": 0.1})


def learner_on(server: FakeServer) -> TinkerLearner:
    return TinkerLearner(TinkerModel(server.connect, lambda service: service.create(), server.rest), config=CONFIG)


def rows(count: int = 4) -> list[Sample]:
    """A prompt of 3 tokens, then the model's with a tool result of 2 among them."""
    made = []
    for i in range(count):
        n = 6 + i
        policy = [False] * 3 + [j not in (1, 2) for j in range(n)]
        echo = [False] * 3 + [j in (1, 2) for j in range(n)]
        ids = RNG.integers(0, VOCABULARY, 3 + n)
        logprobs = np.where(policy, RNG.uniform(-4, -1, 3 + n), 0.0)
        made.append(Sample(ids, policy, echo, logprobs, RNG.normal(size=3 + n), i // 2, 3))  # type: ignore[arg-type]
    return made


def old_of(samples: list[Sample], known: float = 1.0) -> list[Array]:
    """Near the uniform policy of the beginning, so that some ratios are clipped and some are not."""
    uniform = -np.log(VOCABULARY)
    return [
        np.where(RNG.uniform(size=len(s.token_ids)) < known, uniform + RNG.normal(0, 0.4, len(s.token_ids)), np.nan)
        for s in samples
    ]


def expected_gradient(batch: Batch, loss: StepLoss) -> torch.Tensor:
    """Of the bigram table at 0, by our own loss over all tokens at once."""
    table = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)
    tokens, at = scored_tokens(batch, echo=loss.echo_tokens > 0)
    first = torch.zeros(1, dtype=torch.float64)  # nothing predicts a row's first token
    own = [
        torch.cat([first, scored(table, ids[:-1].tolist(), torch.tensor(ids[1:]).long())])
        for ids in batch.split(batch.token_ids)
    ]
    terms = loss(tokens, torch.cat(own)[torch.from_numpy(at)], None).terms
    (terms * torch.tensor(loss.weights, dtype=torch.float64)).sum().backward()
    assert table.grad is not None
    return table.grad


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo", "gspo", "cross_entropy"]
# how the old logprobs are known -> which requests a step sends for the losses that the server has itself
KNOWN = {"on-policy": None, "all": 1.0, "some": 0.5}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("echo", [0.0, 0.2])
def test_every_loss_has_the_gradient_that_it_has_here(loss: Any, known: str, echo: float) -> None:
    samples, server = rows(), FakeServer()
    share = KNOWN[known]
    batch = Batch.of(samples, old_logprobs=None if share is None else old_of(samples, share))
    terms = loss_of(samples, loss, echo_coefficient=echo)
    learner = learner_on(server)
    learner.forward_backward(batch, terms)
    found = learner.model._client.weights.grad
    torch.testing.assert_close(found, expected_gradient(batch, terms), atol=1e-8, rtol=1e-5)
    by_gradient = ("sapo", "vespo", "gspo", "cross_entropy")
    native = {"cispo": "cispo"}.get(loss, "ppo") if loss not in by_gradient else "cross_entropy"
    expected = [native if known == "all" else "cross_entropy"]
    expected += ["cross_entropy"] if echo and expected[0] != "cross_entropy" else []
    assert server.log[2:] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"beta": 0.1, "kl_bias_correction": True},
        {"delta": 1.5},
        {"importance_correction": "token_truncate"},
        {"importance_correction": "sequence_mask"},
        {"off_policy_mask_threshold": 0.5},
        {"ratio": "sequence"},
        {"epsilon": 0.05, "epsilon_high": 0.01},
    ],
    ids=lambda options: " ".join(options),
)
def test_every_option_of_the_objective_has_its_gradient(options: dict[str, Any]) -> None:
    samples = rows()
    learner, batch = learner_on(FakeServer()), Batch.of(samples, old_logprobs=old_of(samples))
    if "beta" in options:
        batch.ref_logprobs = learner.forward(batch, reference=True) - 0.3
    terms = StepLoss.of(Batch.of(samples), Objective(**options), max_completion_length=16)
    learner.forward_backward(batch, terms)
    found = learner.model._client.weights.grad
    torch.testing.assert_close(found, expected_gradient(batch, terms), atol=1e-8, rtol=1e-5)


def step(learner: TinkerLearner, samples: list[Sample]) -> tuple[float, dict[str, float]]:
    batch = Batch.of(samples)
    found = learner.forward_backward(batch, loss_of(samples))
    norm = learner.optim_step(0.1, max_grad_norm=1.0)
    return norm, found.metrics()


def test_metrics_are_those_of_the_local_learner() -> None:
    norm, metrics = step(learner_on(FakeServer()), rows())
    assert norm > 0
    assert {"loss", "policy_loss", "ratio_mean", "kl_sampler", "sampler_gap_max", "tokens_computed"} <= set(metrics)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1.0


def test_other_work_is_done_before_the_servers_answers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, samples, said = learner_on(FakeServer()), rows(), list[str]()
    answer = learner.model.answer
    monkeypatch.setattr(learner.model, "answer", lambda change: said.append("answer") or answer(change))
    learner.forward_backward(Batch.of(samples), loss_of(samples))
    learner.optim_step(0.1, max_grad_norm=1.0, host_work=lambda: said.append("other work"))
    assert said[0] == "other work"
    assert set(said[1:]) == {"answer"}


@pytest.mark.parametrize("where", ["before it is sent", "in the answer"])
def test_a_loss_that_is_not_finite_leaves_the_model_as_it_was(where: str) -> None:
    server, samples = FakeServer(), rows()
    learner = learner_on(server)
    step(learner, samples)
    before = learner.model._client.weights.detach().clone()
    terms = loss_of(samples)
    learner.forward_backward(Batch.of(samples[:2]), terms)
    if where == "before it is sent":
        bad = replace(samples[3], advantages=float("nan"))  # type: ignore[arg-type]
        with pytest.raises(NotFiniteError, match="group 1: the loss is nan, expected a finite number"):
            learner.forward_backward(Batch.of([bad]), terms)
    else:
        found = learner.forward_backward(Batch.of(samples[2:]), terms)
        found.terms = replace(found.terms, row_losses=np.array([1.0, np.nan]))
        with pytest.raises(NotFiniteError, match="group 1: the loss is nan"):
            learner.optim_step(0.1, max_grad_norm=1.0)
    assert learner.optim_step(0.1, max_grad_norm=1.0) == 0.0  # nothing is left of it
    assert torch.equal(learner.model._client.weights.detach(), before)
    assert learner.model._client.weights.grad is None


def test_an_entropy_bonus_is_refused_by_name() -> None:
    samples = rows()
    terms = loss_of(samples, entropy_coefficient=0.1)
    with pytest.raises(UnsupportedError, match=r"entropy_coefficient = 0\.1: .*set train\.entropy_coefficient to 0"):
        learner_on(FakeServer()).forward_backward(Batch.of(samples), terms)


def test_a_checkpoint_holds_the_path_of_a_state_that_is_loaded_with_its_optimizer(tmp_path: Path) -> None:
    server, samples = FakeServer(), rows()
    learner = learner_on(server)
    step(learner, samples)
    aside = tmp_path / ".step-000001.partial"
    aside.mkdir()
    learner.save(aside)
    expected = step(learner, samples)
    resumed = learner_on(server)
    resumed.load(aside)
    assert step(resumed, samples) == expected
    assert torch.equal(resumed.model._client.weights, learner.model._client.weights)


def test_states_of_pruned_checkpoints_are_deleted_at_the_server(tmp_path: Path) -> None:
    server = FakeServer()
    learner = learner_on(server)
    for name in ("step-000001", "step-000002", "step-000003"):
        step(learner, rows())
        aside = tmp_path / f".{name}.partial"
        aside.mkdir()
        learner.save(aside)
        aside.rename(tmp_path / name)
        for old in sorted(tmp_path.iterdir())[:-1]:
            (old / "tinker.json").unlink()
            old.rmdir()
    assert [path.rpartition("/")[2][:11] for path in server.states] == ["step-000002", "step-000003"]


def test_a_checkpoint_of_another_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"has no state of a Tinker server .*another backend trained the run"):
        learner_on(FakeServer()).load(tmp_path)


def test_the_norm_is_found_by_whatever_name_the_server_has_for_it() -> None:
    assert gradient_norm({"grad_norm": 2.0, "lr": 1.0}) == 2.0
    assert gradient_norm({"unclipped_grad_l2:mean": 3.0}) == 3.0
    assert np.isnan(gradient_norm({}))
