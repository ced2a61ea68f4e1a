import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from palestra.algo.step_loss import coefficient_at, world_model_loss
from palestra.core.errors import SettingError

NORMALIZATIONS = ("selected_tokens", "sequence_mean", "seq_mean_token_sum_norm")


def _padded(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [R, T, V], targets [R, T] and which positions are bodies of tool results [R, T]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 6, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    observed = torch.rand(4, 6, generator=generator) < 0.4
    observed[2] = False
    return logits, torch.randint(11, (4, 6), generator=generator), observed


def _ours(logits: torch.Tensor, targets: torch.Tensor, observed: torch.Tensor, how: str, parts: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(4).chunk(parts):
        mask = observed[rows]
        logprobs = logits[rows].log_softmax(-1).gather(-1, targets[rows][..., None])[..., 0][mask]
        total = total + world_model_loss(
            logprobs,
            mask.nonzero()[:, 0],
            mask.sum(1),
            normalization=how,
            tokens_total=int(observed.sum()),
            rows_total=int(observed.any(1).sum()),
            max_sequence_length=6,
        )
    return total


def _plain(logits: torch.Tensor, targets: torch.Tensor, observed: torch.Tensor, how: str) -> torch.Tensor:
    labels = targets.masked_fill(~observed, -100)
    if how == "selected_tokens":
        return cross_entropy(logits.flatten(0, 1), labels.flatten())
    if how == "sequence_mean":
        each = [cross_entropy(x, y) for x, y in zip(logits, labels, strict=True) if (y != -100).any()]
        return torch.stack(each).mean()
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 6


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_loss_and_gradient_equal_plain_cross_entropy(how: str, parts: int) -> None:
    logits, targets, observed = _padded()
    ours, plain = _ours(logits, targets, observed, how, parts), _plain(logits, targets, observed, how)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    mine, other = (torch.autograd.grad(x, logits)[0] for x in (ours, plain))
    torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert (mine[~observed] == 0).all()


@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_no_observed_token_gives_zero_loss_with_a_live_graph(how: str) -> None:
    logits, targets, observed = _padded()
    loss = _ours(logits, targets, torch.zeros_like(observed), how, 2)
    loss.backward()
    assert loss.item() == 0.0
    assert (logits.grad == 0).all()


def test_schedules_start_at_the_coefficient_and_end_where_they_should() -> None:
    settings_ = {"initial": 0.08, "final": 0.02, "steps_total": 7, "step_every": 3}
    at = lambda schedule: [coefficient_at(s, schedule=schedule, **settings_) for s in range(8)]  # noqa: E731
    assert at("constant") == [0.08] * 8
    assert at("linear") == pytest.approx([0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02])
    assert at("step") == pytest.approx([0.08, 0.08, 0.08, 0.04, 0.04, 0.04, 0.02, 0.02])


@settings(max_examples=50, deadline=None)
@given(step=st.integers(0, 200), initial=st.floats(0, 1), schedule=st.sampled_from(["constant", "linear", "step"]))
def test_a_schedule_never_rises_above_its_start_or_falls_below_its_floor(step, initial, schedule) -> None:
    value = coefficient_at(step, schedule=schedule, initial=initial, final=initial / 4, steps_total=50)
    assert initial / 4 - 1e-12 <= value <= initial


def test_a_linear_schedule_needs_the_number_of_steps() -> None:
    with pytest.raises(SettingError, match="max_steps"):
        coefficient_at(0, schedule="linear", initial=0.1)
