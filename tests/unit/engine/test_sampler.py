"""Sampling: the distribution is the promised one, and a seed means a text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra.core.types import SamplingParams
from palestra.engine.sampler import SamplingRow, _possible, sample, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])


def draw(n: int, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """n draws from LOGITS at n places of one sequence."""
    params = SamplingParams(max_new_tokens=1, **options)  # type: ignore[arg-type]
    return sample(LOGITS.repeat(n, 1), [SamplingRow(params, i, [0, 1]) for i in range(n)])


def frequencies(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=5) / len(tokens)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_follow_the_distribution_and_the_logprob_says_so(temperature: float) -> None:
    tokens, logprobs = draw(40_000, temperature=temperature)
    expected = (LOGITS / temperature).softmax(-1)
    assert (frequencies(tokens) - expected).abs().max() < 0.01
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_temperature_zero_takes_the_most_likely_with_its_logprob_at_one() -> None:
    tokens, logprobs = draw(3, temperature=0.0)
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[0].repeat(3))


@pytest.mark.parametrize(
    ("options", "tokens_left"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.01}, 1),
        ({"min_p": 0.3}, 2),
        ({"top_k": 3, "top_p": 0.6}, 1),
    ],
)
def test_truncation_keeps_the_likely_and_renormalises(options: dict[str, float], tokens_left: int) -> None:
    tokens, logprobs = draw(20_000, **options)
    expected = LOGITS[:tokens_left].softmax(-1)
    assert int(tokens.max()) == tokens_left - 1
    assert (frequencies(tokens)[:tokens_left] - expected).abs().max() < 0.015
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_repetition_penalty_lowers_what_was_seen() -> None:
    tokens, logprobs = draw(1, temperature=0.0, repetition_penalty=3.0)  # 0 and 1 are in the sequence
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(torch.tensor([2 / 3, 1 / 3, 0.0, -1.0, -5.0]).log_softmax(-1)[0].item())


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    kinds = [
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, seed=5),
        SamplingParams(1, seed=5, top_p=0.5, temperature=0.7),
        SamplingParams(1, seed=8, repetition_penalty=1.4),
    ]
    rows = [SamplingRow(params, 11, [1, 2]) for params in kinds]
    together = sample(LOGITS.repeat(4, 1), rows)
    for i, row in enumerate(rows):
        alone = sample(LOGITS[None], [row])
        assert together[0][i] == alone[0][0]
        assert together[1][i].item() == pytest.approx(alone[1][0].item())


def test_draws_are_uniform_repeatable_and_below_one() -> None:
    draws = uniforms([7] * 100_000, range(100_000))
    assert np.array_equal(draws, uniforms([7] * 100_000, range(100_000)))
    assert draws.min() > 0.0
    assert draws.max() < 1.0
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    neighbours = np.corrcoef(draws[:-1], draws[1:])[0, 1]
    assert abs(neighbours) < 0.02


def test_neighbouring_and_negative_seeds_give_unrelated_draws() -> None:
    a, b = uniforms(range(10_000), [3] * 10_000), uniforms(range(-10_000, 0), [3] * 10_000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05


def test_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf])
    rows = [SamplingRow(SamplingParams(1, seed=s), 0, []) for s in range(5000)]
    tokens, _ = sample(logits.repeat(5000, 1), rows)
    assert set(tokens.tolist()) == {1}


def test_a_token_of_probability_0_is_never_chosen_where_rounding_would_have_it() -> None:
    probs = torch.tensor([[0.0, 0.7, 0.3, 0.0], [0.2, 0.0, 0.8, 0.0], [0.5, 0.5, 0.0, 0.0]])
    assert _possible(torch.tensor([3, 0, 1]), probs).tolist() == [1, 0, 1]
