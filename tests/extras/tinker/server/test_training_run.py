"""What is recorded of the rows that a client trains."""

from types import SimpleNamespace

import numpy as np

from palestra.extras.tinker.server.checkpoints import TrainingRun, _rollout
from palestra.extras.tinker.server.messages import Datum


def datum(prompt: list[int], answer: list[int]) -> Datum:
    tokens = np.array([*prompt, *answer], np.int32)
    trained = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32)
    values = {"target_tokens": tokens[1:], "weights": trained}
    return Datum(tokens[:-1], {name: SimpleNamespace(values=value) for name, value in values.items()})


def rollout(prompt: list[int], answer: list[int]):
    tokenizer = SimpleNamespace(decode=lambda ids, **options: str(list(ids)))
    row = datum(prompt, answer)
    return _rollout(row, "cross_entropy", np.zeros(len(row.token_ids), np.float32), tokenizer, 1)


def test_the_id_of_a_prompt_is_the_same_in_every_process():
    assert rollout([1, 2, 3], [4, 5]).problem_id == rollout([1, 2, 3], [6]).problem_id == "137bbf3e"
    assert rollout([1, 2, 4], [4, 5]).problem_id != rollout([1, 2, 3], [4, 5]).problem_id


def test_rows_of_one_prompt_are_one_group_also_where_others_lie_between():
    written = []
    run = TrainingRun.__new__(TrainingRun)
    run._step, run._tokenizer = 0, None
    run._tracker = SimpleNamespace(metrics=lambda *row: None, rollouts=lambda step, groups: written.extend(groups))
    run._begin_step()
    run._rollouts = [rollout([1, 2], [3]), rollout([7, 8], [3]), rollout([1, 2], [4])]
    run._write_step(SimpleNamespace(learning_rate=1.0), 1.0, 0.0, 0.0)
    assert [len(group.rollouts) for group in written] == [2, 1]
