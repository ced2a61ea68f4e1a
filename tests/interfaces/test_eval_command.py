"""`palestra eval` scores the cases that training holds out, and says which they are."""

import json
from typing import Any

import pytest

from palestra.agent_source import load_agent_file
from palestra.cli import train as eval_module
from palestra.cli.train import _cases
from palestra.core.errors import PalestraError
from palestra.core.files import read_jsonl


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


COUNTED = """
import os
import signal
from pathlib import Path


@measure
def right_price(ctx):
    with open("calls", "a") as file:
        print(ctx.case.id, file=file)
    if Path("stop").exists() and len(Path("calls").read_text().splitlines()) == 3:
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
    return str(ctx.expect) in ctx.final_assistant_message.text


cases = [{"input": f"What does a {item} cost?", "expect": cost} for item, cost in PRICES.items()]
suite = EvalSuite.from_records(cases, measures=[right_price])
held_out = 0
"""
OUT = ("--out", "scores.jsonl", "--json")


def test_an_interrupted_evaluation_is_resumed_without_repeating_an_attempt(cli, agent_file, tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.rollout.evaluate.ATTEMPTS_BETWEEN_WRITES", 2)
    file = str(agent_file(more=COUNTED))
    calls = tmp_path / "calls"
    whole = cli.json("eval", file, "--out", "whole.jsonl")
    order = calls.read_text().split()
    assert len(order) == whole["cases"] == 5

    calls.unlink()
    (tmp_path / "stop").touch()
    assert cli("eval", file, *OUT).code == 130
    (tmp_path / "stop").unlink()
    kept = [row["problem_id"] for row in read_jsonl(tmp_path / "scores.jsonl") if "problem_id" in row]
    assert len(kept) == 2
    with (tmp_path / "scores.jsonl").open("a") as lines:
        lines.write('{"problem_id": "cut')  # as after a kill

    calls.unlink()
    answer = cli.ok("eval", file, *OUT, "--resume")
    assert sorted(calls.read_text().split()) == sorted(set(order) - set(kept))
    resumed = json.loads(answer.out.splitlines()[-1])
    assert {k: v for k, v in resumed.items() if k != "seconds"} == {k: v for k, v in whole.items() if k != "seconds"}
    rows = [row for row in read_jsonl(tmp_path / "scores.jsonl") if "problem_id" in row]
    assert sorted(row["problem_id"] for row in rows) == sorted(order)


def test_a_file_of_another_evaluation_is_not_continued(cli, agent_file, tmp_path) -> None:
    file = str(agent_file())
    assert "--out" in cli("eval", file, "--resume").err
    assert "scores.jsonl" in cli("eval", file, *OUT, "--resume").err
    assert cli("eval", file, *OUT).code == 0
    assert "--resume" in cli("eval", file, *OUT).err
    changed = cli("eval", file, *OUT, "--resume", "--rollout.max_new_tokens", "41")
    assert (changed.code, "rollout.max_new_tokens" in changed.err) == (2, True)
    (tmp_path / "scores.jsonl").write_text("{}\n")
    assert cli("eval", file, *OUT, "--resume").code == 2
