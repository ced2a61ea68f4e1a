"""Logs that TRL, verifiers and the Tinker cookbook wrote themselves (recorded/README.md says how)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboard_client import foreign_client
from starlette.testclient import TestClient

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


def opened(path: Path, home: Path) -> tuple[dict, list[dict], TestClient, str]:
    client, api = foreign_client(path, home)
    rows = client.get(f"{api}/rollouts", params={"sort": "oldest"}).json()["rollouts"]
    return client.get(api).json(), rows, client, api


def test_two_steps_of_trl_have_their_groups_scores_and_advantages(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    run, rows, client, api = opened(RECORDED / "trl", tmp_path)
    assert (run["source"], run["step"], len(rows)) == ("trl", 2, 16)
    assert [len({row["group"] for row in rows if row["step"] == step}) for step in (1, 2)] == [2, 2]
    assert [measure["name"] for measure in run["measures"]] == ["short", "says_price"]
    for group in {row["group"] for row in rows}:
        advantages = [row["advantage"] for row in rows if row["group"] == group]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-5)
    first = client.get(f"{api}/rollouts/{rows[0]['id']}").json()
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert first["messages"][0]["text"] == "What do 4 red lamps cost?"


def test_calls_that_verifiers_writes_as_text_are_calls(tmp_path) -> None:
    run, rows, client, api = opened(RECORDED / "verifiers0", tmp_path)
    assert (run["source"], len(rows)) == ("verifiers", 6)
    assert [row["problem_id"] for row in rows] == ["0", "0", "1", "1", "2", "2"]
    called = next(row for row in rows if row["tool_calls"])
    whole = client.get(f"{api}/rollouts/{called['id']}").json()
    call = whole["messages"][1]["tool_calls"][0]
    assert isinstance(call["arguments"], dict)
    assert call["name"] == called["tools"][0]
    assert whole["seconds"] > 0
    assert "tool_call_reward_func" in whole["scores"]


def test_traces_of_verifiers_1_open_with_tool_calls_and_what_came_back(tmp_path) -> None:
    run, rows, client, api = opened(RECORDED / "verifiers1", tmp_path)
    assert (run["source"], [row["problem_id"] for row in rows]) == ("verifiers", ["0", "0", "1", "1"])
    assert rows[0]["group"] == rows[1]["group"] != rows[2]["group"]
    called = next(row for row in rows if row["tool_calls"])
    messages = client.get(f"{api}/rollouts/{called['id']}").json()["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_the_cookbooks_tree_gives_its_summaries_their_conversations(tmp_path) -> None:
    run, rows, client, api = opened(RECORDED / "cookbook", tmp_path)
    assert (run["source"], len(rows)) == ("cookbook", 16)
    assert {row["question"] for row in rows} == {row["problem_id"] for row in rows}, "no rollout is without its text"
    assert [measure["name"] for measure in run["measures"]] == ["format", "correct"]
    messages = client.get(f"{api}/rollouts/{rows[0]['id']}").json()["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    metrics = client.get(f"{api}/metrics").json()
    assert len(metrics["series"]["optim/entropy"]) == 2
    assert "completion_length_mean" not in metrics["series"], "lengths are not known without tokens"
    assert "all rollouts of a problem earned the same reward" in run["findings"][0]["sentence"]


def test_an_attempt_of_the_tree_is_found_by_its_reward(tmp_path) -> None:
    rewards = [0.0, 1.0, 0.0]  # of the trajectories; the attempt that earned 1 ended last
    ended = [("wrong", "0.000"), ("also wrong", "0.000"), ("right", "1.000")]
    attempts = [
        part
        for text, reward in ended
        for part in (section("Policy Response", said(text)), section("Reward", table(reward=reward)))
    ]
    totals = [section(f"Trajectory {i} Episode", table(total_return=f"{r:.3f}")) for i, r in enumerate(rewards)]
    group = section("Group Rollout", *attempts, section("Trajectory Details", *totals))
    (tmp_path / "train_logtree.json").write_text(json.dumps({"root": {"tag": "body", "children": [group]}}))
    lines = [
        {"split": "train", "iteration": 0, "group_idx": 0, "total_reward": r, "steps": [{"ac_len": 5, "reward": r}]}
        for r in rewards
    ]
    summaries = "".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "group_idx": 1}])
    (tmp_path / "train_rollout_summaries.jsonl").write_text(summaries)
    _, rows, _, _ = opened(tmp_path, tmp_path / "home")
    assert [row["answer"] for row in rows] == ["wrong", "right", "also wrong", "5 tokens (the log has no text)"]


def section(title: str, *children: dict) -> dict:
    body = {"tag": "div", "children": list(children)}
    return {"tag": "section", "children": [{"tag": "h3", "children": [title]}, body]}


def table(**cells: str) -> dict:
    rows = [[{"tag": "td", "children": [text]} for text in pair] for pair in cells.items()]
    return {"tag": "table", "children": [{"tag": "tr", "children": row} for row in rows]}


def said(text: str) -> dict:
    message = {"role": "assistant", "content": text}
    return {"tag": "div", "children": [], "data": {"type": "conversation", "messages": [message]}}
