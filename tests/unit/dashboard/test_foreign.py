"""Runs that others made: each in its own form, shown as ours."""

from __future__ import annotations

import json

import pytest
from dashboard_client import foreign_client
from starlette.testclient import TestClient

from palestra.dashboard.foreign import open_foreign


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


def shown(path, tmp_path) -> tuple[dict, list[dict], TestClient, str]:
    client, api = foreign_client(path, tmp_path / "home")
    rows = client.get(f"{api}/rollouts", params={"sort": "oldest"}).json()["rollouts"]
    return client.get(api).json(), rows, client, api


def test_completions_of_trl_open_with_rewards_groups_and_advantages(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    folder = tmp_path / "out" / "completions"
    folder.mkdir(parents=True)
    for step in (10, 20):
        table = {
            "step": [step] * 4,
            "prompt": ["What is 1+1?"] * 2 + ["What is 2+2?"] * 2,
            "completion": ["2", "3", [{"role": "assistant", "content": "4"}][0]["content"], "5"],
            "accuracy": [1.0, 0.0, 1.0, 0.0],
            "format": [0.5, 0.5, 0.0, None],
            "advantage": [1.0, -1.0, 1.0, -1.0],
        }
        parquet.write_table(pyarrow.table(table), folder / f"completions_{step:05d}.parquet")
    run, rows, client, api = shown(tmp_path / "out", tmp_path)
    assert (run["source"], run["state"], run["step"]) == ("trl", "completed", 20)
    assert [row["reward"] for row in rows[:4]] == [1.5, 0.5, 1.0, 0.0]
    assert [row["advantage"] for row in rows[:4]] == [1.0, -1.0, 1.0, -1.0]
    assert rows[0]["group"] == rows[1]["group"] != rows[2]["group"]
    assert client.get(f"{api}/metrics").json()["series"]["score/accuracy"] == [0.5, 0.5]
    assert client.get(f"{api}/rollouts", params={"q": "2+2"}).json()["count"] == 4


def test_results_of_verifiers_open_with_their_conversations(tmp_path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    rows = [
        {
            "example_id": i // 2,
            "prompt": [{"role": "user", "content": f"question {i // 2}"}],
            "completion": [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "found", "tool_call_id": "c"},
                {"role": "assistant", "content": f"answer {i}"},
            ],
            "reward": i / 4,
            "metrics": {"correct": float(i % 2)},
            "error": "it broke" if i == 3 else None,
            "is_truncated": False,
        }
        for i in range(4)
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, found, client, api = shown(tmp_path / "results.jsonl", tmp_path)
    assert run["source"] == "verifiers"
    assert [row["answer"] for row in found] == [f"answer {i}" for i in range(4)]
    assert found[0]["tools"] == ["search"]
    assert found[0]["group"] == found[1]["group"] != found[2]["group"]
    assert (found[3]["stop"], found[3]["error"]) == ("failed", "it broke")
    whole = client.get(f"{api}/rollouts/{found[0]['id']}").json()
    assert [m["role"] for m in whole["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert whole["messages"][1]["tool_calls"][0]["arguments"] == {"q": "x"}


def test_trajectories_of_atif_open_with_the_reward_of_their_trial(tmp_path) -> None:
    agent = tmp_path / "job" / "task-a__1" / "agent"
    agent.mkdir(parents=True)
    steps = [
        {"step_id": 1, "source": "user", "message": "Fix it"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "I look",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "c", "function_name": "bash", "arguments": {"cmd": "ls"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "a.py"}]},
        },
    ]
    trajectory = {"schema_version": "ATIF-v1.7", "agent": {"name": "x"}, "steps": steps}
    (agent / "trajectory.json").write_text(json.dumps(trajectory))
    result = {"task_name": "task-a", "verifier_result": {"rewards": {"reward": 1.0}}}
    (agent.parent / "result.json").write_text(json.dumps(result))
    run, rows, client, api = shown(tmp_path / "job", tmp_path)
    assert run["source"] == "atif"
    assert (rows[0]["problem_id"], rows[0]["reward"], rows[0]["tools"]) == ("task-a", 1.0, ["bash"])
    messages = client.get(f"{api}/rollouts/{rows[0]['id']}").json()["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert messages[2]["text"] == "a.py"


def test_logs_of_the_cookbook_open_with_their_metrics(tmp_path) -> None:
    folder = tmp_path / "log" / "iteration_000001"
    folder.mkdir(parents=True)
    rows = [
        {
            "schema_version": 1, "split": "train", "iteration": 1, "group_idx": g, "traj_idx": t, "tags": ["math"],
            "total_reward": float(t), "final_reward": 0.0, "trajectory_metrics": {"correct": float(t)},
            "steps": [{"step_idx": 0, "ac_len": 12, "reward": float(t), "logs": {"response": f"it is {t}"}}],
        }
        for g in range(2) for t in range(2)
    ]  # fmt: skip
    (folder / "train_rollout_summaries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "log" / "metrics.jsonl").write_text('{"step": 1, "optim/lr": 0.5}\n')
    run, found, client, api = shown(tmp_path / "log", tmp_path)
    assert run["source"] == "cookbook"
    assert [row["reward"] for row in found] == [0.0, 1.0, 0.0, 1.0]
    assert found[0]["answer"] == "response: it is 0"
    series = client.get(f"{api}/metrics").json()["series"]
    assert (series["reward_mean"], series["optim/lr"]) == ([0.5], [0.5])


def test_a_foreign_run_that_grows_is_converted_again_and_others_are_not(tmp_path) -> None:
    row = {"example_id": 0, "prompt": "a", "completion": "b", "reward": 1.0}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    first = open_foreign(tmp_path)
    stamp = first.folder.rollouts_file.stat().st_mtime_ns
    assert open_foreign(tmp_path).folder.rollouts_file.stat().st_mtime_ns == stamp
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    first.refresh()
    assert len(list(first.folder.rollouts())) == 2


def test_a_folder_without_anything_known_is_none(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert open_foreign(tmp_path) is None
