"""Packing samples into micro-batches."""

from __future__ import annotations

import torch

from palestra.algo.batching import Tree, pack, split_minibatches
from palestra.core.machine import ALIGNMENT, to_device
from palestra.core.types import Sample


def row(prompt: list[int], completion: list[int], group: int = 0, trained: bool = True) -> Sample:
    p, c = len(prompt), len(completion)
    logprobs = (0.0,) * p + tuple(-0.1 * (i + 1) for i in range(c))
    return Sample(
        tuple(prompt + completion), (False,) * p + (trained,) * c, (False,) * (p + c), logprobs, 1.0, group, p
    )


def test_siblings_share_one_prompt_and_restart_positions_after_it() -> None:
    [batch] = pack([row([1, 2, 3], [4, 5, 6]), row([1, 2, 3], [7, 8])], max_tokens=100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.trees == (Tree(0, 3, (2, 1)),)
    assert batch.source.tolist() == [2, 3, 4, 2, 5]
    assert batch.target.tolist() == [4, 5, 6, 7, 8]
    assert batch.row.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(batch.sampler_logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.1, -0.2]))


def test_rows_that_claim_a_group_but_differ_in_the_prompt_stay_apart() -> None:
    [batch] = pack([row([1, 2], [4, 5]), row([1, 9], [4, 5])], max_tokens=100)
    assert [tree.prompt_length for tree in batch.trees] == [0, 0]
    assert batch.token_ids.tolist() == [1, 2, 4, 1, 9, 4]


def test_no_micro_batch_exceeds_the_budget_unless_one_row_does() -> None:
    samples = [row(list(range(1, 11)), [20 + i] * (3 + i), group=i // 4) for i in range(12)]
    for budget in (12, 20, 30, 64):
        batches = pack(samples, max_tokens=budget)
        for batch in batches:
            lone = len({int(r) for r in batch.row}) == 1
            assert len(batch.token_ids) <= budget or lone
        found = torch.cat([batch.row for batch in batches])
        assert torch.bincount(found, minlength=12).tolist() == [3 + i for i in range(12)]


def test_even_micro_batches_are_as_many_with_the_same_rows_and_the_largest_is_smaller() -> None:
    samples = [row([1, 2, 3, g], [5] * (6 + (g + i) % 3), group=g) for g in range(10) for i in range(2)]
    for budget in (20, 50, 100, 150, 1000):
        greedy, even = (pack(samples, max_tokens=budget, evenly=evenly) for evenly in (False, True))
        largest = [max(len(batch.token_ids) for batch in batches) for batches in (greedy, even)]
        assert len(even) <= len(greedy)
        assert largest[1] <= largest[0]
        assert torch.equal(*(torch.cat([batch.row for batch in batches]) for batches in (greedy, even)))
    assert largest[1] == largest[0]  # all in one
    sizes = [len(batch.token_ids) for batch in pack(samples, max_tokens=150, evenly=True)]
    assert max(sizes) - min(sizes) <= 20  # tokens of a group


def test_a_group_that_fits_whole_is_not_split_over_two_micro_batches() -> None:
    samples = [row([1, 2, 3, 4], [5, 6, 7], group=g) for g in (0, 0, 1, 1)]
    assert [batch.trees for batch in pack(samples, max_tokens=12)] == [(Tree(0, 4, (2, 2)),)] * 2


def test_a_row_without_a_scored_token_is_left_out() -> None:
    [batch] = pack([row([1, 2], [3], trained=False), row([1, 2], [4])], max_tokens=100)
    assert batch.row.tolist() == [1]
    assert pack([row([1, 2], [3], trained=False)], max_tokens=100) == []


def test_observed_tokens_are_scored_only_when_asked_for() -> None:
    sample = Sample(
        (1, 2, 3, 4), (False, False, True, False), (False, False, False, True), (0.0, 0.0, -1.0, 0.0), 1.0, 0, 2
    )
    [without] = pack([sample], max_tokens=100)
    [with_observed] = pack([sample], max_tokens=100, echo=True)
    assert without.target.tolist() == [3]
    assert with_observed.target.tolist() == [3, 4]
    assert with_observed.policy_mask.tolist() == [True, False]
    assert with_observed.echo_mask.tolist() == [False, True]


def test_minibatches_keep_order_and_lose_nothing() -> None:
    samples = [row([1], [2], group=i) for i in range(7)]
    parts = split_minibatches(samples, 3)
    assert [len(part) for part in parts] == [2, 3, 2]
    assert [s.group for part in parts for s in part] == list(range(7))
    assert len(split_minibatches(samples[:2], 5)) == 2


def test_tensors_move_to_a_device_together_and_aligned() -> None:
    tensors = [torch.arange(5), torch.tensor([True, False, True]), torch.tensor([]), torch.tensor([0.5, -1.0])]
    moved = to_device(tensors, torch.device("cpu:0"))  # another name of the host's, so that they are copied
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, moved, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in moved}) == 1
    assert all(x.storage_offset() * x.element_size() % ALIGNMENT == 0 for x in moved)
    assert to_device(tensors, torch.device("cpu"))[0] is tensors[0]
