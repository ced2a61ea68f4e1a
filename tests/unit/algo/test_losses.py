import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.algo.losses import Objective, TokenStats, importance_weights, token_weights
from palestra.algo.losses import policy_loss as token_policy_loss
from palestra.algo.step_loss import entropy_bonus, next_entropy_coefficient
from palestra.core.errors import PalestraError


def policy_loss(objective, logprobs, old, row, advantages, **more):
    """With one advantage a row."""
    return token_policy_loss(objective, logprobs, old, row, advantages[row], rows=len(advantages), **more)


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo", "gspo", "cross_entropy")
FULL = {"beta": 0.1, "kl_bias_correction": True, "importance_correction": "token_truncate", "importance_cap": 1.3}


def _objective(loss: str) -> Objective:
    return Objective(loss=loss, epsilon_high=1.5 if loss == "cispo" else None, off_policy_mask_threshold=0.05, **FULL)


def _tokens(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(5, sum(lengths), generator=generator, dtype=torch.float64)
    logprobs = -noise[0].abs()
    return {
        "logprobs": logprobs,
        "old": logprobs + 0.3 * noise[1],
        "sampler": logprobs + 0.4 * noise[2],
        "ref": logprobs + 0.5 * noise[3],
        "entropy": noise[4].abs(),
        "advantages": torch.randn(len(lengths), generator=generator, dtype=torch.float64),
        "row": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    }


def _step(objective: Objective, data: dict[str, Tensor], parts: list[list[int]]) -> tuple[Tensor, Tensor, TokenStats]:
    """Loss and gradient of a step whose rows are dealt to micro-batches."""
    rows, row = len(data["advantages"]), data["row"]
    logprobs = data["logprobs"].clone().requires_grad_()
    loss, stats = torch.zeros((), dtype=torch.float64), TokenStats()
    for part in parts:
        new_row = {old: new for new, old in enumerate(part)}
        chosen = torch.tensor([i for r in part for i in (row == r).nonzero().flatten().tolist()], dtype=torch.int64)
        local = torch.tensor([new_row[int(r)] for r in row[chosen]], dtype=torch.int64)
        per_token, more = policy_loss(
            objective,
            logprobs[chosen],
            data["old"][chosen],
            local,
            data["advantages"][part],
            sampler_logprobs=data["sampler"][chosen],
            ref_logprobs=data["ref"][chosen],
            entropy=data["entropy"][chosen],
        )
        weights = token_weights(
            objective.loss,
            local,
            torch.bincount(local, minlength=len(part)),
            rows_total=rows,
            tokens_total=len(row),
            max_completion_length=16,
        )
        loss = loss + (per_token * weights).sum()
        stats = stats + more
    loss.backward()
    return loss.detach(), logprobs.grad, stats


@st.composite
def dealt_rows(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Row lengths (some 0) and a way to deal the rows, in any order, to micro-batches."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=2, max_size=7).filter(any))
    order = draw(st.permutations(range(len(lengths))))
    cut = draw(st.integers(1, len(lengths) - 1))
    return lengths, [list(order[:cut]), list(order[cut:])], draw(st.integers(0, 10_000))


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=25, deadline=None)
@given(dealt=dealt_rows())
def test_dealing_rows_to_micro_batches_in_any_order_changes_nothing(loss: str, dealt: tuple) -> None:
    lengths, parts, seed = dealt
    data = _tokens(lengths, seed)
    whole = _step(_objective(loss), data, [list(range(len(lengths)))])
    split = _step(_objective(loss), data, parts)
    torch.testing.assert_close(split[:2], whole[:2], rtol=1e-9, atol=1e-12)
    assert split[2].finish() == pytest.approx(whole[2].finish())


@pytest.mark.parametrize("loss", LOSSES)
def test_advantage_zero_trains_nothing_without_kl(loss: str) -> None:
    data = _tokens([3, 0, 4], seed=1)
    data["advantages"][:] = 0.0
    _, gradient, _ = _step(Objective(loss=loss), data, [[0, 1, 2]])
    assert (gradient == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_no_trained_token_gives_zero_loss_with_a_live_graph(loss: str) -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    none, row = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    per_token, stats = policy_loss(
        _objective(loss), logprobs[:0], none, row, torch.ones(2), sampler_logprobs=none, ref_logprobs=none, entropy=none
    )
    weights = token_weights(
        loss, row, torch.zeros(2, dtype=torch.int64), rows_total=2, tokens_total=0, max_completion_length=4
    )
    total = (per_token * weights).sum() + entropy_bonus(none, 0.1, tokens_total=0)
    total.backward()
    assert total.item() == 0.0
    assert (logprobs.grad == 0).all()
    assert stats.finish() == {}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_absurd_ratios_give_finite_loss_and_gradient(loss: str, gap: float) -> None:
    logprobs = torch.tensor([-0.5, -300.0, -0.1, -0.3], requires_grad=True)
    moved = logprobs.detach() + gap
    row, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    per_token, _ = policy_loss(
        _objective(loss),
        logprobs,
        moved,
        row,
        torch.tensor([1.0, -1.0]),
        sampler_logprobs=moved + gap,
        ref_logprobs=moved,
    )
    weights = token_weights(loss, row, lengths, rows_total=2, tokens_total=4, max_completion_length=4)
    (per_token * weights).sum().backward()
    assert per_token.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_on_policy_is_the_policy_gradient(loss: str) -> None:
    """With ratio 1 every objective's gradient is −A times its token weight."""
    data = _tokens([2, 5], seed=3)
    logprobs = data["logprobs"].requires_grad_()
    per_token, _ = policy_loss(Objective(loss=loss), logprobs, None, data["row"], data["advantages"])
    weights = token_weights(
        loss, data["row"], torch.tensor([2, 5]), rows_total=2, tokens_total=7, max_completion_length=8
    )
    (per_token * weights).sum().backward()
    torch.testing.assert_close(logprobs.grad, -weights * data["advantages"][data["row"]])


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo", "sapo"])
def test_gradient_of_a_toy_model_equals_finite_differences(loss: str) -> None:
    """cispo and vespo hold their weight constant on purpose, so only the others have a loss to difference."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    chosen = torch.tensor([0, 2, 1, 1, 2, 0, 2])
    row, lengths = torch.tensor([0, 0, 0, 2, 2, 2, 2]), torch.tensor([3, 0, 4])
    old, sampler, ref = -torch.rand(3, 7, generator=generator, dtype=torch.float64) - 0.5
    objective = Objective(loss=loss, delta=3.0, **FULL)

    def loss_of(weight: Tensor) -> Tensor:
        distribution = torch.log_softmax(features @ weight, dim=-1)
        logprobs = distribution[torch.arange(7), chosen]
        entropy = -(distribution.exp() * distribution).sum(-1)
        advantages = torch.tensor([0.9, 0.3, -1.2], dtype=torch.float64)
        per_token, _ = policy_loss(
            objective, logprobs, old, row, advantages, sampler_logprobs=sampler, ref_logprobs=ref
        )
        weights = token_weights(loss, row, lengths, rows_total=3, tokens_total=7, max_completion_length=5)
        return (per_token * weights).sum() + entropy_bonus(entropy, 0.1, tokens_total=7)

    weight = 0.3 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(loss_of, weight.requires_grad_(), eps=1e-6, atol=1e-7, rtol=1e-5)


def test_rows_without_trained_tokens_still_count_in_means_over_rows() -> None:
    row, lengths = torch.tensor([0, 0]), torch.tensor([2, 0])
    totals = {"rows_total": 2, "tokens_total": 2, "max_completion_length": 4}
    assert token_weights("grpo", row, lengths, **totals).tolist() == [0.25, 0.25]
    assert token_weights("luspo", row, lengths, **totals).tolist() == [0.5, 0.5]
    assert token_weights("dr_grpo", row, lengths, **totals).tolist() == [0.125, 0.125]
    assert token_weights("dapo", row, lengths, **totals).tolist() == [0.5, 0.5]


def test_clip_fractions_count_tokens_that_clipping_silences() -> None:
    logprobs = torch.log(torch.tensor([0.5, 2.0, 0.5, 2.0]))
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0])
    _, stats = policy_loss(Objective(), logprobs, torch.zeros(4), torch.arange(4), advantages)
    done = stats.finish()
    assert done["clip_fraction_low"] == 0.25
    assert done["clip_fraction_high"] == 0.25
    assert done["ratio_max"] == pytest.approx(2.0)
    assert done["ratio_mean"] == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("loss", "high", "upper"), [("cispo", None, 5.0), ("cispo", 3.0, 3.0), ("dapo", None, 1.28), ("dapo", 0.2, 1.2)]
)
def test_cispo_caps_the_ratio_itself_so_its_default_cap_is_above_one(loss: str, high: float, upper: float) -> None:
    assert Objective(loss=loss, epsilon_high=high).upper == pytest.approx(upper)


def test_stats_of_an_empty_micro_batch_add_nothing() -> None:
    _, stats = policy_loss(Objective(), torch.zeros(2), None, torch.tensor([0, 1]), torch.ones(2))
    empty = policy_loss(Objective(), torch.zeros(0), None, torch.zeros(0, dtype=torch.int64), torch.ones(2))[1]
    assert (stats + empty).finish() == (empty + stats).finish() == stats.finish()


def test_sampler_kl_is_zero_for_agreeing_and_positive_for_drifted_logprobs() -> None:
    logprobs, row = -torch.rand(5), torch.zeros(5, dtype=torch.int64)
    for drift in (0.0, 0.4):
        _, stats = policy_loss(Objective(), logprobs, None, row, torch.ones(1), sampler_logprobs=logprobs - drift)
        assert stats.finish()["kl_sampler"] == pytest.approx(math.exp(drift) - drift - 1, abs=1e-6)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"loss": "vespo", "importance_correction": "sequence_mask"}, "token_truncate"),
        ({"beta": 0.1}, "ref_logprobs"),
        ({"importance_correction": "token_mask"}, "sampler_logprobs"),
    ],
)
def test_impossible_objectives_and_terms_without_their_logprobs_are_refused(setting: dict, named: str) -> None:
    with pytest.raises(PalestraError, match=named):
        policy_loss(Objective(**setting), torch.zeros(1), None, torch.zeros(1, dtype=torch.int64), torch.ones(1))


@pytest.mark.parametrize(
    ("now", "entropy", "after"), [(0.01, 0.1, 0.015), (0.01, 0.9, 0.005), (0.002, 0.9, 0.0), (1.0, 0.1, 1.0)]
)
def test_entropy_controller_rises_below_the_target_falls_above_and_stays_in_bounds(now, entropy, after) -> None:
    assert next_entropy_coefficient(now, entropy, target=0.3) == pytest.approx(after)


def test_a_mask_with_two_bounds_drops_both_tails() -> None:
    sampler = torch.tensor([0.0, 0.0, 0.0, 0.0])
    old = torch.tensor([0.4, 0.6, 4.0, 6.0]).log()
    objective = Objective(importance_correction="token_mask", importance_cap=5.0, importance_floor=0.5)
    weights = importance_weights(objective, old, sampler, torch.zeros(4, dtype=torch.int64), 1)
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.6, 4.0, 0.0]))
