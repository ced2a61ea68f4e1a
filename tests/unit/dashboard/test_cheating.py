"""The page "Is it cheating", over a run folder."""

from __future__ import annotations

import make_runs
from dashboard_client import client_of


def suspicion(path, home) -> tuple[dict, dict]:
    client = client_of(path, home)
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    while (found := client.get(f"{api}/suspicion").json())["indexed"] < 1:
        pass
    return found, client.get(api).json()


def test_a_hacked_run_shows_its_alarm_clusters_and_suspects(tmp_path) -> None:
    weights = {"contains_word": 1.0, "true_answer": 0.0}
    run = make_runs.write_run(tmp_path / "run", make_runs.hacked_groups(20), reward_weights=weights)
    found, about = suspicion(run.path, tmp_path / "home")
    assert list(found["witnesses"]) == ["true_answer"]
    assert list(found["rewarded"]) == ["contains_word"]
    assert len(found["alarms"]) == len(about["alarms"]) == 1
    hacked = [row["rollout"] for row in found["suspects"][:20] if make_runs.WORD in row["rollout"]["answer"]]
    assert len(hacked) >= 18
    assert make_runs.WORD in found["clusters"][0]["earliest"]["answer"]
    assert len(found["clusters"][0]["share"]) == len(found["cluster_steps"]) == 20
    assert found["notes"] == []


def test_a_cluster_lists_its_own_rollouts_and_no_others(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.hacked_groups(12), reward_weights={"true_answer": 0.0})
    client = client_of(run.path, tmp_path / "home")
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
    while (found := client.get(f"{api}/suspicion").json())["indexed"] < 1:
        pass
    cluster = next(each for each in found["clusters"] if each["phrase"])
    listed = client.get(f"{api}/rollouts", params={"shape": cluster["shape"], "limit": 200}).json()
    assert listed["count"] == cluster["count"]
    assert all(make_runs.WORD in row["answer"] for row in listed["rollouts"])
    assert client.get(f"{api}/rollouts", params={"shape": "no such shape"}).json()["count"] == 0


def test_without_a_witness_the_page_says_how_to_get_one(run, tmp_path) -> None:
    found, _ = suspicion(run.path, tmp_path / "home")
    assert found["alarms"] == []
    assert "reward_weights" in found["notes"][0]
