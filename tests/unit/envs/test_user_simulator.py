"""Simulated users: the conversation goes on until the goal is reached, and their words are the environment's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.judge_server import stub_model

from palestra import Agent, EvalSuite, UserSimulator, measure, train_grpo
from palestra.core.errors import SettingError, TrainingError
from palestra.core.files import read_jsonl


@measure
def said_something(ctx: Any) -> float:
    return min(1.0, len(ctx.final_assistant_message.text) / 50)


def rollouts_of(folder: Path, user: UserSimulator, group_size: int = 2) -> list[dict[str, Any]]:
    cases = [{"input": f"Hello {i}", "goal": f"Buy {i} lamps."} for i in range(3)]
    suite = EvalSuite.from_records(cases, measures=[said_something], user=user)
    config = {"train.max_steps": 1, "train.problems_per_step": 2, "rollout.group_size": group_size, "eval.cases": 1}
    config |= {"rollout.max_new_tokens": 60, "output_dir": str(folder), "rollout.temperature": 1.0}
    result = train_grpo(Agent("clerk", "palestra/tiny", "Sell."), suite, config=config, progress=False)
    return list(read_jsonl(result.run.rollouts_file))


def test_the_user_goes_on_until_done_and_its_words_are_not_trained(tmp_path: Path) -> None:
    def user(question: str) -> str:
        return "###DONE###" if "You: And a mug?" in question else "And a mug?"

    with stub_model(user) as stub:
        rows = rollouts_of(tmp_path, UserSimulator("m", "Impatient.", base_url=stub.base_url))
    assert "Impatient." in stub.questions[0]
    assert "lamps." in stub.questions[0]  # the goal is the record's
    assert "Sell." not in stub.questions[0]  # the user does not see the instructions
    answered = [row for row in rows if row["stop"] == "answered"]
    assert answered
    for row in answered:
        assert [m["text"] for m in row["messages"] if m["role"] == "user"][1:] == ["And a mug?"]
        assistant = [m for m in row["messages"] if m["role"] == "assistant"]
        assert [t["maker"] for t in row["turns"]].count("model") == len(assistant) >= 2
        assert "environment" in [t["maker"] for t in row["turns"]]


def test_the_user_says_at_most_max_messages(tmp_path: Path) -> None:
    with stub_model(lambda question: "More.") as stub:
        rows = rollouts_of(tmp_path, UserSimulator("m", base_url=stub.base_url, max_messages=2))
    said = [sum(m["text"] == "More." for m in row["messages"]) for row in rows]
    assert max(said) == 2
    with pytest.raises(SettingError, match="max_messages"):
        UserSimulator("palestra/tiny", max_messages=0)
    with pytest.raises(TrainingError, match="user m"):  # one that fails, fails its attempt
        rollouts_of(tmp_path, UserSimulator("m", base_url="http://127.0.0.1:9/v1", attempts=1))


def test_the_policy_may_play_the_user_and_what_it_says_there_is_not_trained(tmp_path: Path) -> None:
    rows = rollouts_of(tmp_path, UserSimulator("policy", max_messages=1, max_new_tokens=8, temperature=1.0))
    spoken = [row for row in rows if sum(m["role"] == "user" for m in row["messages"]) == 2]
    assert spoken
    for row in spoken:
        assistant = sum(m["role"] == "assistant" for m in row["messages"])
        assert [t["maker"] for t in row["turns"]].count("model") == assistant
