"""Runs in the dashboard: the list, one run, its metrics, logs and events."""

import asyncio
import json

import pytest

from palestra.core.config import RunConfig
from palestra.evals.report import Paired, pair
from palestra.extras.dashboard.catalog import Catalog, by_step, charts, columns, read_rows, sparkline
from palestra.extras.dashboard.run_routes import RunRoutes, new_lines, recent_lines
from palestra.runs.manager import RunManager


def test_the_list_has_a_line_for_each_run_and_finds_words(client, run) -> None:
    found = client.get("/api/runs").json()
    assert found["total"] == 1
    row = found["runs"][0]
    assert row["folder"] == str(run.path)
    assert row["model"] == "palestra/tiny"
    assert row["step"] == 3
    assert len(row["sparkline"]) == 3
    assert client.get("/api/runs?q=SHOP").json()["total"] == 1
    assert client.get("/api/runs?q=nothing").json()["total"] == 0
    assert client.get("/api/runs?state=failed").json()["total"] == 0
    assert client.get("/api/runs/nothing").status_code == 404
    client.get(f"/api/runs/{row['id']}/rollouts")  # writes the index into the folder
    assert client.get("/api/runs").json()["runs"][0]["created"] == row["created"]


def test_a_run_tells_its_settings_and_measures_and_how_many_rollouts_a_step_takes(api, run) -> None:
    found = api()
    assert found["config"]["model"]["name"] == "palestra/tiny"
    assert "train.learning_rate" in found["changed"]
    assert found["measures"] == [{"name": "right_total", "weight": 1.0, "rewarded": True}]
    assert found["actions"] == ["rescore"]  # it has no weights, and the index does not list it
    sizes = {"train.problems_per_step": 1, "rollout.group_size": 4}
    RunConfig.build({"model.name": "palestra/tiny", **sizes}).save(run.config_file)
    run.metrics_file.write_text('{"step": 1, "rollouts": 8}\n{"step": 2, "rollouts": 4}\n{"step": 2, "eval/n": 1}\n')
    assert api()["sampling"] == {"planned": 4, "mean": 6}


def test_a_run_tells_its_capability_and_links_the_examples_of_its_findings(api, run) -> None:
    run.add_to_record(capability={"text": "3.5 calls per attempt"})
    example = {"source": "train", "step": 2, "index": 5, "problem_id": "p", "text": "so"}
    finding = {"kind": "looping", "sentence": "It loops.", "settings": [], "example": example}
    elsewhere = finding | {"example": example | {"source": "after"}}
    older = {"kind": "looping", "sentence": "It loops.", "settings": []}
    run.report_file.write_text(json.dumps({"findings": [finding, elsewhere, older]}))
    found = api()
    assert found["capability"]["text"] == "3.5 calls per attempt"
    linked, missing, without = (row["example"] for row in found["findings"])
    assert linked["location"] == "rollouts.jsonl, step 2, rollout 5"
    rollout = api(f"rollouts/{linked['id']}")
    assert (rollout["step"], rollout["problem_id"]) == (2, list(run.rollouts())[8 + 5]["problem_id"])
    assert missing["id"] is None, "there is no such file"
    assert without is None


def test_metrics_are_columns_with_a_row_a_step_which_an_evaluation_shares(api, run) -> None:
    found = api("metrics")
    rows = run.metrics()
    assert found["step"] == [row["step"] for row in rows]
    assert found["series"]["reward_mean"] == [row["reward_mean"] for row in rows]
    assert found["charts"][0]["names"][0] == "reward_mean"
    assert api("metrics", after=2)["step"] == [3]
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": float("nan")}, {"step": 2, "eval/pass_rate": 0.5}]
    assert columns(by_step(rows)) == {"step": [1, 2], "series": {"a": [1.0, None], "eval/pass_rate": [None, 0.5]}}


def test_every_metric_is_in_one_chart_and_a_learning_rate_is_not_drawn_as_a_share() -> None:
    shares = ["pass_rate", "pass_rate/a", "my_rate", "clip_fraction_low"]
    names = [
        "reward_mean",
        "score/a",
        "score/b",
        "brand_new",
        "entropy",
        "learning_rate",
        "stage/learning_rate",
        *shares,
    ]
    units = [(name, chart["unit"]) for chart in charts(names) for name in chart["names"]]
    assert sorted(name for name, _ in units) == sorted(names)
    assert {name for name, unit in units if unit == "%"} == set(shares)


def test_half_a_line_of_metrics_waits(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "rew')
    rows, position = read_rows(path)
    assert [row["step"] for row in rows] == [1]
    with path.open("a") as file:
        file.write('ard_mean": 0.75}\n')
    rows, position = read_rows(path, position)
    assert sparkline(rows) == [0.75]
    assert read_rows(path, position) == ([], position)


def test_paired_problems_and_their_p_value() -> None:
    first = {"a": True, "b": False, "c": False, "d": True, "only here": True}
    second = {"a": True, "b": True, "c": True, "d": False}
    assert pair(first, second) == Paired(both=1, only_first=1, only_second=2, neither=0)
    assert Paired(0, 0, 0, 9).p_value == 1.0
    assert Paired(0, 0, 6, 0).p_value == pytest.approx(2 / 64)
    assert Paired(0, 5, 5, 0).p_value == 1.0


@pytest.fixture
def routes(run, tmp_path, monkeypatch) -> RunRoutes:
    monkeypatch.setattr("palestra.extras.dashboard.run_routes._RUN_EVERY_S", 0.01)
    return RunRoutes(Catalog(RunManager(tmp_path / "home"), [run]))


def test_events_are_the_whole_state_then_new_steps_and_at_the_end_of_a_run_its_end(routes, run, monkeypatch) -> None:
    run_id = routes._catalog.all()[0].id

    async def collect() -> list:
        return [event async for event in routes._run_events(run_id)]

    found = asyncio.run(collect())
    assert [name for name, _ in found] == ["metrics", "run", "findings", "rollouts", "end"]
    assert found[0][1]["step"] == [1, 2, 3]
    monkeypatch.setattr("palestra.runs.reader.Run.is_active", True)

    async def follow() -> list:
        found = []
        async for name, data in routes._run_events(run_id):
            if name == "metrics":
                found.append(data["step"])
                if len(found) == 2:
                    return found
                with run.metrics_file.open("a") as file:
                    file.write(json.dumps({"step": 4, "reward_mean": 1.0}) + "\n")
        return found

    assert asyncio.run(follow()) == [[1, 2, 3], [4]]


def test_lines_that_are_written_to_a_log_come_as_events_each_once(routes, tmp_path, monkeypatch) -> None:
    active = [True]
    monkeypatch.setattr("palestra.runs.reader.Run.is_active", property(lambda self: active[0]))
    log = tmp_path / "trainer.log"
    log.write_text("step 1\nstep 2\nste")  # the third is being written
    writes = iter(["p 3\n", "step 4\nTraceback"])

    async def follow() -> list:
        found = []
        async for name, data in routes._log_events(routes._catalog.all()[0].id, log):
            found.append(data.get("lines", name))
            if text := next(writes, ""):
                with log.open("a") as file:
                    file.write(text)
            else:
                active[0] = False
        return found

    assert asyncio.run(follow()) == [["step 1", "step 2"], ["step 3"], ["step 4"], ["Traceback"], "end"]


def test_a_log_is_shown_from_its_last_lines_and_anew_when_it_was_begun_anew(tmp_path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("".join(f"line {i}\n" for i in range(300_000)))
    lines, position = recent_lines(log, 3)
    assert (lines, position) == (["line 299997", "line 299998", "line 299999"], log.stat().st_size)
    log.write_text("again\n")
    assert new_lines(log, position) == (["again"], 6)
    assert recent_lines(tmp_path / "none.log", 3) == ([], 0)


def test_the_list_without_a_path_has_the_folders_of_runs_too(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(run.path.parent.parent)
    assert [found.folder.path for found in Catalog(RunManager(tmp_path / "home")).all()] == [run.path]
