"""`palestra eval` scores the cases that training holds out, and says which they are."""

from typing import Any

import pytest

from palestra.agent_source import load_agent_file
from palestra.cli import eval as eval_module
from palestra.cli.eval import _cases
from palestra.core.errors import PalestraError


@pytest.mark.parametrize(
    ("split", "count", "words"),
    [
        ("held-out", 1, "1 held-out cases (--split all: also the 4 trained on)"),
        ("train", 4, "the 4 cases that are trained on"),
        ("all", 5, "all 5 cases of the suite, 4 of them trained on"),
    ],
)
def test_the_cases_are_those_that_training_holds_out_unless_asked(agent_file, tmp_path, split, count, words):
    file = load_agent_file(str(agent_file()))
    suite, named, scored = _cases(file, split)
    assert (len(suite), named, scored) == (count, words, split)
    trained, held = file.suite.split(0.2, seed=0)  # as train_grpo does it
    expected = {"held-out": held, "train": trained, "all": file.suite}[split]
    assert [case.id for case in suite] == [case.id for case in expected]


def test_where_nothing_is_held_out_the_training_cases_are_scored_and_called_so(agent_file) -> None:
    file = load_agent_file(str(agent_file(more="held_out = 0")))
    suite, named, scored = _cases(file, "held-out")
    assert (len(suite), named, scored) == (5, "the 5 cases that are trained on; none are held out", "train")


def test_cases_are_scored_by_the_measures_and_weights_of_the_training(cli, agent_file, monkeypatch) -> None:
    given: dict[str, Any] = {}

    def evaluate(agent: Any, suite: Any, measures: Any, **options: Any) -> None:
        given.update(options, measures=[measure.name for measure in measures])
        raise PalestraError("enough")

    monkeypatch.setattr(eval_module, "evaluate", evaluate)
    more = "held_out = EvalSuite.from_records([{'input': 'x'}])\nreward_weights = {'right_price': 2}"
    assert "enough" in cli("eval", str(agent_file(more=more))).err
    assert (given["measures"], given["reward_weights"]) == (["right_price"], {"right_price": 2})
