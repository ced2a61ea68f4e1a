"""Packing samples into micro-batches."""

from typing import Any

import numpy as np
import pytest
import torch
from builders import samples_of

from palestra.algo.batch import Batch, Targets
from palestra.algo.batching import MicroBatch, Tree, pack
from palestra.core.machine import ALIGNMENT, to_device
from palestra.core.types import Sample


def row(prompt: list[int], completion: list[int], group: int = 0, trained: bool = True) -> Sample:
    p, c = len(prompt), len(completion)
    logprobs = (0.0,) * p + tuple(-0.1 * (i + 1) for i in range(c))
    return Sample(
        tuple(prompt + completion), (False,) * p + (trained,) * c, (False,) * (p + c), logprobs, 1.0, group, p
    )


def test_siblings_share_one_prompt_and_restart_positions_after_it() -> None:
    [batch] = pack(Batch.of([row([1, 2, 3], [4, 5, 6]), row([1, 2, 3], [7, 8])]), max_tokens=100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.trees == (Tree(0, 3, (2, 1)),)
    assert batch.source.tolist() == [2, 3, 4, 2, 5]
    assert batch.target.tolist() == [4, 5, 6, 7, 8]
    assert batch.row.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(batch.inputs["logprobs"], torch.tensor([-0.1, -0.2, -0.3, -0.1, -0.2]))


def test_rows_that_claim_a_group_but_differ_in_the_prompt_stay_apart() -> None:
    [batch] = pack(Batch.of([row([1, 2], [4, 5]), row([1, 9], [4, 5])]), max_tokens=100)
    assert [tree.prompt_length for tree in batch.trees] == [0, 0]
    assert batch.token_ids.tolist() == [1, 2, 4, 1, 9, 4]


def test_no_micro_batch_exceeds_the_budget_unless_one_row_does() -> None:
    samples = [row(list(range(1, 11)), [20 + i] * (3 + i), group=i // 4) for i in range(12)]
    for budget in (12, 20, 30, 64):
        batches = pack(Batch.of(samples), max_tokens=budget)
        for batch in batches:
            lone = len({int(r) for r in batch.row}) == 1
            assert len(batch.token_ids) <= budget or lone
        found = torch.cat([batch.row for batch in batches])
        assert torch.bincount(found, minlength=12).tolist() == [3 + i for i in range(12)]


def test_even_micro_batches_are_as_many_with_the_same_rows_and_the_largest_is_smaller() -> None:
    samples = [row([1, 2, 3, g], [5] * (6 + (g + i) % 3), group=g) for g in range(10) for i in range(2)]
    for budget in (20, 50, 100, 150, 1000):
        greedy, even = (pack(Batch.of(samples), max_tokens=budget, evenly=evenly) for evenly in (False, True))
        largest = [max(len(batch.token_ids) for batch in batches) for batches in (greedy, even)]
        assert len(even) <= len(greedy)
        assert largest[1] <= largest[0]
        assert torch.equal(*(torch.cat([batch.row for batch in batches]) for batches in (greedy, even)))
    assert largest[1] == largest[0]  # all in one
    sizes = [len(batch.token_ids) for batch in pack(Batch.of(samples), max_tokens=150, evenly=True)]
    assert max(sizes) - min(sizes) <= 20  # tokens of a group


def test_a_group_that_fits_whole_is_not_split_over_two_micro_batches() -> None:
    samples = [row([1, 2, 3, 4], [5, 6, 7], group=g) for g in (0, 0, 1, 1)]
    assert [batch.trees for batch in pack(Batch.of(samples), max_tokens=12)] == [(Tree(0, 4, (2, 2)),)] * 2


def with_root(samples: list[Sample], max_tokens: int = 100, **options: Any) -> list[MicroBatch]:
    return pack(Batch.of(samples), max_tokens=max_tokens, min_root=2, **options)


def test_a_beginning_that_all_rows_share_comes_once_before_the_trees() -> None:
    samples = [row([1, 2, 3, 3], [4, 5, 6]), row([1, 2, 3, 3], [7, 8]), row([1, 2, 9], [4, 5, 5], group=1)]
    [batch] = with_root(samples)
    assert batch.root == 2
    assert batch.token_ids.tolist() == [1, 2, 3, 3, 4, 5, 7, 9, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 3, 4]
    assert batch.trees == (Tree(2, 2, (2, 1)), Tree(7, 0, (3,)))
    assert batch.source.tolist() == [3, 4, 5, 3, 6, 7, 8, 9]
    [whole] = pack(Batch.of(samples), max_tokens=100)
    assert whole.root == 0
    assert torch.equal(batch.token_ids[batch.source], whole.token_ids[whole.source])
    assert torch.equal(batch.position_ids[batch.source], whole.position_ids[whole.source])
    assert torch.equal(batch.target, whole.target)


def test_the_root_ends_before_the_token_that_predicts_the_first_scored_one() -> None:
    samples = [row([1, 2, 3, 4], [5, i, 6], group=i) for i in (7, 8)]
    assert [batch.root for batch in with_root(samples)] == [3]
    targets = Targets(np.array([5, 6]), np.array([5, 3]), np.array([0, 1, 2]), {"weights": np.ones(2, np.float32)})
    rows = [np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 4])]
    [micro] = pack(Batch.of_targets(rows, targets, np.arange(2), np.full(2, 4)), max_tokens=64, min_root=2)
    assert (micro.root, micro.token_ids.tolist(), micro.source.tolist()) == (2, [1, 2, 3, 4, 5, 3], [4, 5])


def test_a_prompt_that_ends_within_the_root_leaves_trees_without_a_prompt() -> None:
    first = row([1, 2, 3], [4, 5, 6])
    samples = [
        Sample(s.token_ids, s.policy_mask, s.echo_mask, s.logprobs, 1.0, group, 1)
        for group, s in ((0, first), (0, row([1, 2, 9], [7])), (1, first))
    ]
    [batch] = with_root(samples)
    assert (batch.root, batch.trees) == (2, (Tree(2, 0, (3, 1)), Tree(6, 0, (3,))))
    assert batch.token_ids[batch.source].tolist() == [3, 4, 5, 9, 3, 4, 5]


def test_there_is_no_root_of_few_tokens_for_one_tree_or_for_unlike_rows() -> None:
    alike = [row([1, 2, 3], [4, 5], group=g) for g in (0, 1)]
    assert [batch.root for batch in with_root(alike)] == [2]
    assert [batch.root for batch in pack(Batch.of(alike), max_tokens=100, min_root=3)] == [0]
    assert [batch.root for batch in pack(Batch.of(alike), max_tokens=100)] == [0]
    assert [batch.root for batch in with_root([row([1, 2, 3], [4, 5])] * 2)] == [0]
    assert [batch.root for batch in with_root([*alike, row([1, 9, 3], [4, 5], group=2)])] == [0]
    assert [batch.root for batch in with_root([*alike, row([1, 9], [4], group=2, trained=False)])] == [2]
    assert [batch.root for batch in with_root(alike, max_rows=1)] == [0, 0]


def test_the_root_counts_once_in_the_size_of_a_micro_batch() -> None:
    samples = [row([*range(10), 20 + g, 30], [5] * 4, group=g) for g in range(8) for _ in range(2)]
    for evenly in (False, True):
        batches = with_root(samples, max_tokens=34, evenly=evenly)
        assert [len(batch.token_ids) for batch in batches] == [10 + 3 * 8] * 2 + [10 + 2 * 8]
        assert torch.bincount(torch.cat([batch.row for batch in batches])).tolist() == [4] * 16
    batches = with_root(samples, max_tokens=17)  # which has no room for two trees and a root
    assert [(batch.root, len(batch.token_ids)) for batch in batches] == [(0, 15)] * 16


@pytest.mark.parametrize(("lengths", "root"), [((8, 9), 6), ((8, 7), 5), ((9, 9), 6), ((7, 6), 4)])
def test_no_prompt_has_a_single_token_behind_the_root(lengths: tuple[int, int], root: int) -> None:
    """All prompts begin with the same six tokens."""
    samples = [row([*range(6), *[10 + g] * (n - 6)], [5, 6], group=g) for g, n in enumerate(lengths) for _ in range(2)]
    [batch] = with_root(samples)
    assert batch.root == root
    assert all(tree.prompt_length != 1 for tree in batch.trees)


def test_a_row_without_a_scored_token_is_left_out() -> None:
    [batch] = pack(Batch.of([row([1, 2], [3], trained=False), row([1, 2], [4])]), max_tokens=100)
    assert batch.row.tolist() == [1]
    assert pack(Batch.of([row([1, 2], [3], trained=False)]), max_tokens=100) == []


def test_observed_tokens_are_scored_only_when_asked_for() -> None:
    sample = Sample(
        (1, 2, 3, 4), (False, False, True, False), (False, False, False, True), (0.0, 0.0, -1.0, 0.0), 1.0, 0, 2
    )
    [without] = pack(Batch.of([sample]), max_tokens=100)
    [with_observed] = pack(Batch.of([sample]), max_tokens=100, echo=True)
    assert without.target.tolist() == [3]
    assert with_observed.target.tolist() == [3, 4]
    assert with_observed.policy.tolist() == [0]
    assert with_observed.echo.tolist() == [1]


def test_minibatches_keep_order_and_lose_nothing() -> None:
    batch = Batch.of([row([1], [2] * (1 + i), group=i) for i in range(7)])
    parts = batch.minibatches(3)
    assert [part.rows for part in parts] == [2, 3, 2]
    assert [group for part in parts for group in part.groups] == list(range(7))
    assert np.concatenate([part.token_ids for part in parts]).tolist() == batch.token_ids.tolist()
    assert [part.offsets[0] for part in parts] == [0, 0, 0]
    assert len(batch.part(0, 2).minibatches(5)) == 2


def test_a_batch_gives_the_rows_that_it_was_made_of() -> None:
    samples = [row([1, 2], [3] * i, group=i) for i in range(3)]
    batch = Batch.of(samples, old_logprobs=[sample.logprobs - 1 for sample in samples])
    assert samples_of(batch) == samples
    assert batch.count(batch.predicted(np.ones(9, bool))).tolist() == [1, 2, 3]
    assert batch.row_of([0, 1, 2, 4, 8]).tolist() == [0, 0, 1, 1, 2]
    assert [part.tolist() for part in batch.split(batch.token_ids)] == [[1, 2], [1, 2, 3], [1, 2, 3, 3]]
    assert batch.part(1, 3).old_logprobs.tolist() == batch.old_logprobs[2:].tolist()
    assert Batch.of([]).rows == 0


def test_targets_may_be_several_for_a_place_and_are_scored_once_in_a_shared_prompt() -> None:
    ids, places = np.array([5, 6, 7, 5, 6, 9]), np.array([1, 2, 3, 1, 2, 3])
    targets = Targets(ids, places, np.array([0, 3, 6]), {"weights": np.arange(6, dtype=np.float32)})
    rows = [np.array([1, 2, 3]), np.array([1, 2, 4])]
    [micro] = pack(Batch.of_targets(rows, targets, np.zeros(2, int), np.full(2, 2)), max_tokens=64)
    assert micro.token_ids.tolist() == [1, 2, 3, 4]
    assert (micro.source.tolist(), micro.target.tolist()) == ([0, 1, 2, 1, 3], [5, 6, 7, 6, 9])
    assert micro.each.tolist() == [0, 1, 2, 0, 3, 4]
    assert micro.inputs["weights"].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(pack(Batch.of_targets(rows, targets, np.zeros(2, int), np.full(2, 2)), max_tokens=64, max_rows=1)) == 2


def test_tensors_move_to_a_device_together_and_aligned() -> None:
    tensors = [torch.arange(5), torch.tensor([True, False, True]), torch.tensor([]), torch.tensor([0.5, -1.0])]
    moved = to_device(tensors, torch.device("cpu:0"))  # another name of the host's, so that they are copied
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, moved, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in moved}) == 1
    assert all(x.storage_offset() * x.element_size() % ALIGNMENT == 0 for x in moved)
    assert to_device(tensors, torch.device("cpu"))[0] is tensors[0]
