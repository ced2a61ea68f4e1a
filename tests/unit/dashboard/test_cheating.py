"""The page "Is it cheating", over a run folder."""

import make_runs
from dashboard_client import Api, api_of


def reward_hacking(run, home) -> tuple[dict, Api]:
    api = api_of(run, home)
    while (found := api("suspicion"))["indexed"] < 1:
        pass
    return found, api


WEIGHTS = {"contains_word": 1.0, "true_answer": 0.0}


def test_a_hacked_run_shows_its_alarm_clusters_and_suspects(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.hacked_groups(20), reward_weights=WEIGHTS)
    found, api = reward_hacking(run, tmp_path / "home")
    assert list(found["witnesses"]) == ["true_answer"]
    assert list(found["rewarded"]) == ["contains_word"]
    assert len(found["alarms"]) == len(api()["alarms"]) == 1
    hacked = [row["rollout"] for row in found["suspects"][:20] if make_runs.WORD in row["rollout"]["answer"]]
    assert len(hacked) >= 18
    assert make_runs.WORD in found["clusters"][0]["earliest"]["answer"]
    assert len(found["clusters"][0]["share"]) == len(found["cluster_steps"]) == 20
    assert found["notes"] == []
    cluster = next(each for each in found["clusters"] if each["phrase"])
    listed = api("rollouts", shape=cluster["shape"], limit=200)
    assert listed["count"] == cluster["count"]
    assert all(make_runs.WORD in row["answer"] for row in listed["rollouts"])
    assert api("rollouts", shape="no such shape")["count"] == 0


def test_an_honest_run_has_nothing_to_look_at_and_the_page_says_how_to_add_a_check_metric(run, tmp_path) -> None:
    honest = make_runs.write_run(tmp_path / "run", make_runs.hacked_groups(20, hacked=False), reward_weights=WEIGHTS)
    found, _ = reward_hacking(honest, tmp_path / "home")
    assert found["clusters"]
    assert found["alarms"] == found["suspects"] == []
    found, _ = reward_hacking(run, tmp_path / "home")
    assert found["alarms"] == []
    assert "reward_weights" in found["notes"][0]
