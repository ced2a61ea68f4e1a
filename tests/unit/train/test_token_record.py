"""The record of a step's tokens: each value beside the token that it is of."""

from dataclasses import replace

import numpy as np
from loop_fakes import FakeOutputs, attempt, make_loop

from palestra.core.types import Group, Lineage, Turn
from palestra.train.batch import to_batch
from palestra.train.update import TokenRecord


def test_values_lie_beside_their_tokens_and_failed_rollouts_keep_their_place() -> None:
    good, failed = attempt("0", 1.0), replace(attempt("0", 0.0), error="it broke")
    other = Lineage((Turn("template", (1, 2)), Turn("model", (9,), (-3.0,), 0)), (), "answered")
    several = replace(attempt("0", 0.0), lineages=(other,))
    groups, advantages = [Group("0", (failed, good, several))], [[0.0, 0.5, -0.5]]
    batch = to_batch(groups, advantages, mask_truncated=True)
    record = TokenRecord(batch)
    for first, part in zip((0, 2), batch.minibatches(2), strict=True):
        record.add(first, part, FakeOutputs(part, entropy=0.25))
    table = record.table(groups, advantages)

    length = sum(len(turn.token_ids) for turn in good.turns)
    assert len(table) == 3 * length + 3
    first, second, third, fourth = np.split(table, [length, 2 * length, 3 * length])
    assert not first["policy_mask"].any()
    assert np.isnan(first["entropy"]).all()
    by_model = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in good.turns])
    assert (second["policy_mask"] == by_model).all()
    for part, advantage in ((second, 0.5), (third, -0.5)):
        assert set(part["entropy"][by_model]) == {0.25}
        assert set(part["learner_logprob"][by_model]) == {-1.0}
        assert set(part["ratio"][by_model]) == {1.0}
        assert set(part["advantage"][by_model].tolist()) == {advantage}
        assert np.isnan(part["entropy"][~by_model]).all()
    assert fourth["logprob"].tolist()[-1] == -3.0
    assert fourth["advantage"].tolist()[-1] == -0.5


def test_of_several_passes_the_last_ratio_counts() -> None:
    groups = [Group("0", (attempt("0", 1.0),))]
    batch = to_batch(groups, [[1.0]], mask_truncated=True)
    record = TokenRecord(batch)
    record.add(0, batch, FakeOutputs(batch, 0.1))
    batch.old_logprobs = np.full(len(batch.token_ids), -2.0)
    record.add(0, batch, FakeOutputs(batch, 0.9))
    table = record.table(groups, [[1.0]])
    assert np.allclose(table["ratio"][table["policy_mask"]], np.e)
    assert np.allclose(table["entropy"][table["policy_mask"]], 0.1)


def test_tokens_every_thins_the_record_and_0_switches_it_off() -> None:
    for every, steps in ((1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])):
        loop = make_loop({"track.tokens_every": every})
        for _ in range(4):
            loop.training.step()
        assert list(loop.tracker.tables) == steps
