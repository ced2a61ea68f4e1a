"""Runs that other tools made, shown as ours: recorded logs of TRL, verifiers and the cookbook, and made ones.

recorded/README.md says how the logs were recorded.
"""

import json
from pathlib import Path

import pytest
from dashboard_client import foreign_api

from palestra.extras.dashboard.foreign import open_foreign

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


def roles(messages: list[dict]) -> list[str]:
    return [message["role"] for message in messages]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_two_steps_of_trl_have_their_groups_scores_and_advantages(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    api = foreign_api(RECORDED / "trl", tmp_path)
    run, rows = api(), api.rows()
    assert (run["source"], run["state"], run["step"], len(rows)) == ("trl", "completed", 2, 16)
    assert [len({row["group"] for row in rows if row["step"] == step}) for step in (1, 2)] == [2, 2]
    assert [measure["name"] for measure in run["measures"]] == ["short", "says_price"]
    for group in {row["group"] for row in rows}:
        advantages = [row["advantage"] for row in rows if row["group"] == group]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-5)
    assert all(row["reward"] == sum(score["value"] for score in row["scores"].values()) for row in rows)
    first = api(f"rollouts/{rows[0]['id']}")
    assert roles(first["messages"]) == ["user", "assistant"]
    assert first["messages"][0]["text"] == "What do 4 red lamps cost?"
    assert api("rollouts", q="lamps")["count"] > 0


def test_a_reward_function_of_trl_that_does_not_apply_has_no_score(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = {"prompt": ["1+1?"] * 2, "completion": ["2", "3"], "accuracy": [1.0, 0.0], "format": [0.5, None]}
    parquet.write_table(pyarrow.table(table), tmp_path / "completions_00010.parquet")
    assert [row["reward"] for row in foreign_api(tmp_path, tmp_path / "home").rows()] == [1.5, 0.0]


def test_calls_that_verifiers_writes_as_text_are_calls(tmp_path) -> None:
    api = foreign_api(RECORDED / "verifiers0", tmp_path)
    rows = api.rows()
    assert (api()["source"], [row["problem_id"] for row in rows]) == ("verifiers", ["0", "0", "1", "1", "2", "2"])
    called = next(row for row in rows if row["tool_calls"])
    whole = api(f"rollouts/{called['id']}")
    call = whole["messages"][1]["tool_calls"][0]
    assert isinstance(call["arguments"], dict)
    assert call["name"] == called["tools"][0]
    assert whole["seconds"] > 0
    assert "tool_call_reward_func" in whole["scores"]


def test_results_of_verifiers_have_groups_errors_and_calls_in_openais_form(tmp_path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "c"},
    ]
    rows = [{"example_id": i // 2, "prompt": "question", "completion": said, "reward": i / 4} for i in range(4)]
    rows[3]["error"] = "it broke"
    write_lines(tmp_path / "results.jsonl", rows)
    api = foreign_api(tmp_path / "results.jsonl", tmp_path / "home")
    found = api.rows()
    assert found[0]["group"] == found[1]["group"] != found[2]["group"]
    assert (found[3]["stop"], found[3]["error"], found[3]["reward"]) == ("failed", "it broke", 0.75)
    messages = api(f"rollouts/{found[0]['id']}")["messages"]
    assert roles(messages) == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["arguments"] == {"q": "x"}


def test_traces_of_verifiers_1_open_with_tool_calls_and_their_results(tmp_path) -> None:
    api = foreign_api(RECORDED / "verifiers1", tmp_path)
    rows = api.rows()
    assert (api()["source"], [row["problem_id"] for row in rows]) == ("verifiers", ["0", "0", "1", "1"])
    assert rows[0]["group"] == rows[1]["group"] != rows[2]["group"]
    called = next(row for row in rows if row["tool_calls"])
    messages = api(f"rollouts/{called['id']}")["messages"]
    assert roles(messages) == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_trajectories_of_atif_open_with_the_reward_of_their_trial(tmp_path) -> None:
    agent = tmp_path / "job" / "task-a__1" / "agent"
    agent.mkdir(parents=True)
    looks = {"source": "agent", "message": "I look", "reasoning_content": "hm"}
    looks["tool_calls"] = [{"tool_call_id": "c", "function_name": "bash", "arguments": {"cmd": "ls"}}]
    looks["observation"] = {"results": [{"source_call_id": "c", "content": "a.py"}]}
    trajectory = {"schema_version": "ATIF-v1.7", "steps": [{"source": "user", "message": "Fix it"}, looks]}
    (agent / "trajectory.json").write_text(json.dumps(trajectory))
    result = {"task_name": "task-a", "verifier_result": {"rewards": {"reward": 1.0}}}
    (agent.parent / "result.json").write_text(json.dumps(result))
    api = foreign_api(tmp_path / "job", tmp_path / "home")
    (row,) = api.rows()
    assert api()["source"] == "atif"
    assert (row["problem_id"], row["reward"], row["tools"]) == ("task-a", 1.0, ["bash"])
    messages = api(f"rollouts/{row['id']}")["messages"]
    assert roles(messages) == ["user", "assistant", "tool"]
    assert [m["text"] for m in messages[1:]] == ["<think>hm</think>\nI look", "a.py"]


def test_the_cookbooks_tree_gives_its_summaries_their_conversations(tmp_path) -> None:
    api = foreign_api(RECORDED / "cookbook", tmp_path)
    run, rows = api(), api.rows()
    assert (run["source"], len(rows)) == ("cookbook", 16)
    assert {row["question"] for row in rows} == {row["problem_id"] for row in rows}, "no rollout is without its text"
    assert [measure["name"] for measure in run["measures"]] == ["format", "correct"]
    assert roles(api(f"rollouts/{rows[0]['id']}")["messages"]) == ["user", "assistant", "user", "assistant"]
    series = api("metrics")["series"]
    assert len(series["optim/entropy"]) == 2
    assert "completion_length_mean" not in series, "lengths are not known without tokens"
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
    logged = {**lines[0], "group_idx": 2, "steps": [{"logs": {"response": "it is 0"}}]}
    write_lines(tmp_path / "train_rollout_summaries.jsonl", [*lines, {**lines[0], "group_idx": 1}, logged])
    answers = [row["answer"] for row in foreign_api(tmp_path, tmp_path / "home").rows()]
    assert answers == ["wrong", "right", "also wrong", "5 tokens (the log has no text)", "response: it is 0"]


def section(title: str, *children: dict) -> dict:
    body = {"tag": "div", "children": list(children)}
    return {"tag": "section", "children": [{"tag": "h3", "children": [title]}, body]}


def table(**cells: str) -> dict:
    rows = [[{"tag": "td", "children": [text]} for text in pair] for pair in cells.items()]
    return {"tag": "table", "children": [{"tag": "tr", "children": row} for row in rows]}


def said(text: str) -> dict:
    message = {"role": "assistant", "content": text}
    return {"tag": "div", "children": [], "data": {"type": "conversation", "messages": [message]}}


def test_a_foreign_run_that_grows_is_converted_again_and_others_are_not(tmp_path) -> None:
    row = {"example_id": 0, "prompt": "a", "completion": "b", "reward": 1.0}
    write_lines(tmp_path / "results.jsonl", [row])
    first = open_foreign(tmp_path)
    stamp = first.folder.rollouts_file.stat().st_mtime_ns
    assert open_foreign(tmp_path).folder.rollouts_file.stat().st_mtime_ns == stamp
    write_lines(tmp_path / "results.jsonl", [row, row])
    first.refresh()
    assert len(list(first.folder.rollouts())) == 2
    (tmp_path / "unknown").mkdir()
    assert open_foreign(tmp_path / "unknown") is None
