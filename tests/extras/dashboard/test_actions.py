"""What the dashboard can change: runs started from a form, stopped, resumed and deleted; jobs."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from builders import wait_until
from dashboard_client import client_for
from listed_runs import list_run
from starlette.testclient import TestClient

from palestra.core.errors import PalestraError
from palestra.core.files import MANIFEST, write_text
from palestra.core.run_folder import RunFolder
from palestra.extras.agent_tools import launcher as launchers
from palestra.extras.agent_tools.config_fields import EnvDescription
from palestra.extras.agent_tools.launcher import FormLauncher
from palestra.extras.agent_tools.locks import Site
from palestra.extras.dashboard import action_routes
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.manager import RunManager


class Started(RunManager):
    """Takes runs down, and starts no process."""

    def _launch(self, run_id: str, folder: RunFolder) -> None:
        pass


@dataclass
class Page:
    client: TestClient
    manager: RunManager

    def call(self, method: str, path: str, status: int = 200, **body):
        headers = {"Content-Type": "application/json"}
        response = self.client.request(method, path, headers=headers, **({"json": body} if method == "POST" else {}))
        assert response.status_code == status, response.text
        return response.json()


@pytest.fixture
def page(tmp_path, monkeypatch) -> Page:
    monkeypatch.chdir(tmp_path)
    own = EnvDescription([], {"train.max_steps": 24, "rollout.group_size": 8})
    monkeypatch.setattr(launchers, "_describe_agent", lambda found: own)
    manager = Started(tmp_path / "home")
    site = Site(run={"train.beta": 0.1}, maximum={"train.max_steps": 100})
    with client_for(Catalog(manager), launcher=FormLauncher(manager, site)) as client:
        yield Page(client, manager)


def test_a_form_has_the_values_of_the_subject_shows_what_is_locked_and_says_what_is_wrong(page) -> None:
    form = page.call("POST", "/api/form", agent_file="demo")
    fields = {row["name"]: row for row in form["fields"]}
    assert fields["train.max_steps"]["value"] == 24
    assert fields["train.max_steps"]["kind"] == "integer"
    assert fields["train.max_steps"]["maximum"] == 100
    assert fields["train.loss"]["kind"] == "choice"
    assert "train.beta" not in fields
    assert ("train.beta", 0.1) in [(row["name"], row["value"]) for row in form["locked"]]
    values = {"train.max_steps": "101", "train.learning_rate": "much", "train.beta": 0.2, "nothing": 1, "lora.r": "8"}
    errors = page.call("POST", "/api/form/check", agent_file="demo", values=values)["errors"]
    assert set(errors) == {"train.max_steps", "train.learning_rate", "train.beta", "nothing"}
    assert "locked" in errors["train.beta"]
    assert "100" in errors["train.max_steps"]


def test_a_run_is_started_with_the_edited_and_the_locked_settings_and_a_bad_field_starts_nothing(page) -> None:
    answer = page.call("POST", "/api/runs", 400, agent_file="demo", values={"train.max_steps": 101})
    assert answer["error"]["field"] == "train.max_steps"
    assert page.manager.list() == []
    page.call("POST", "/api/runs", 400, agent_file="demo", environment="calculator")
    for name in ("no/such/file.py", "\0.py", "x" * 5000 + ".py"):
        page.call("POST", "/api/runs", 400, agent_file=name)
    page.call("POST", "/api/runs", 422, agent_file="demo", unknown=1)
    run = page.call("POST", "/api/runs", 201, agent_file="demo", values={"train.max_steps": "3"}, name="my run")["run"]
    assert (run["name"], run["state"], run["actions"]) == ("my-run", "pending", ["stop"])
    request = json.loads(RunFolder(page.manager.get(run["id"]).folder).request_file.read_text())
    assert request["agent_file"] is None
    assert request["settings"]["train.max_steps"] == 3
    assert request["settings"]["train.beta"] == 0.1


def test_a_run_is_stopped_resumed_and_deleted_when_it_can_be(page) -> None:
    run = page.call("POST", "/api/runs", 201, agent_file="demo")["run"]
    path = f"/api/runs/{run['id']}"
    page.call("DELETE", path, 400)
    page.call("POST", f"{path}/resume", 400)
    assert page.call("POST", f"{path}/stop")["run"]["state"] == "stopping"
    page.manager._index.move(run["id"], ["stopping"], "stopped")
    assert page.call("GET", path)["actions"] == ["resume", "delete"]
    page.call("POST", f"{path}/export", 400)
    assert page.call("POST", f"{path}/resume")["run"]["state"] == "pending"
    page.manager._index.move(run["id"], ["pending"], "failed", reason="no such tool")
    folder = page.manager.get(run["id"]).folder
    listed = page.call("GET", "/api/runs")["runs"][0]
    assert (listed["reason"], listed["actions"]) == ("no such tool", ["delete"])
    page.call("POST", f"{path}/resume", 400)
    checkpoint = RunFolder(folder).checkpoints / "step-000001"
    checkpoint.mkdir(parents=True)
    write_text(checkpoint / MANIFEST, "{}")
    assert "resume" in page.call("GET", path)["actions"]
    assert page.call("DELETE", path) == {"deleted": run["id"]}
    assert not folder.exists()
    page.call("GET", path, 404)


def test_agent_files_are_found_by_their_text_and_not_run(page, tmp_path) -> None:
    (tmp_path / "shop.py").write_text("raise SystemExit('it was run')\nagent = 1\nsuite = 2\n")
    (tmp_path / "other.py").write_text("agent = 1\n")
    (tmp_path / "broken.py").write_text("agent = (\n")
    found = page.call("GET", "/api/environments")
    assert found["agents"] == ["demo", "shop.py"]
    assert "calculator" in [row["name"] for row in found["environments"]]
    kinds = [(row["family"] is not None, row["origin"] != "built-in") for row in found["environments"]]
    assert kinds == sorted(kinds)
    assert {row["family"] for row in found["environments"]} <= {None, "reasoning_gym"}
    assert "calculator" in page.call("GET", "/api/environment?name=calculator")["docs"]


def test_code_is_run_from_the_working_directory_and_the_folders_named_at_the_start_alone(tmp_path, monkeypatch) -> None:
    names = ("here", "here/deeper", "named", "elsewhere")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "shop.py").write_text("agent = 1\nsuite = 2\n")
    (tmp_path / "here" / "link.py").symlink_to(tmp_path / "elsewhere" / "shop.py")
    monkeypatch.chdir(tmp_path / "here")
    ran = []
    monkeypatch.setattr(launchers, "_describe_agent", lambda found: ran.append(found) or EnvDescription([], {}))
    manager = Started(tmp_path / "home")
    client = client_for(Catalog(manager), launcher=FormLauncher(manager, Site(), [tmp_path / "named"]))
    outside = [tmp_path / "elsewhere" / "shop.py", "../elsewhere/shop.py", "link.py", "../named/../elsewhere/shop.py"]
    for path, agent_file in product(("/api/form", "/api/form/check", "/api/runs"), outside):
        assert client.post(path, json={"agent_file": str(agent_file)}).status_code == 400
    assert ran == []
    for agent_file in ("shop.py", "deeper/shop.py", str(tmp_path / "named" / "shop.py")):
        assert client.post("/api/form", json={"agent_file": agent_file}).status_code == 200
    listed = client.get("/api/environments").json()["agents"]
    assert listed == ["demo", "link.py", "shop.py", str(tmp_path / "named" / "shop.py")]


def test_measures_of_another_folder_are_not_run(run, tmp_path, monkeypatch) -> None:
    outside = tmp_path / "stricter.py"
    outside.write_text("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ran = []
    monkeypatch.setattr(action_routes, "command", lambda words: ran.append(words) or (lambda job: None))
    client = client_of_one(Started(tmp_path / "home"), run)
    path = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}/rescore"
    assert client.post(path, json={"measures": str(outside)}).status_code == 400
    assert ran == []
    Path("own.py").write_text("")
    assert client.post(path, json={"measures": "own.py"}).status_code == 202
    assert ran[0][2:4] == ["--measures", "own.py"]


def test_a_viewer_changes_nothing(run, tmp_path) -> None:
    client = client_for(Catalog(RunManager(tmp_path / "home"), [run]))
    assert client.get("/api/status").json()["can_start"] is False
    for path in ("/api/runs", "/api/form/check"):
        assert client.post(path, json={}).status_code in (404, 405)


def finished(job: action_routes.Job) -> action_routes.Job:
    wait_until(lambda: job.state != "running")
    return job


def test_a_job_tells_its_progress_result_and_failure() -> None:
    running = action_routes.Jobs()

    def work(job: action_routes.Job) -> int:
        job.advance(1, 2, "half")
        return 42

    def fail(job: action_routes.Job) -> None:
        raise PalestraError("it is broken; fix it")

    done, failed = running.start("a", "", work), running.start("b", "", fail)
    assert (finished(done).result, done.state, done.progress["message"]) == (42, "done", "half")
    assert (finished(failed).error, failed.state) == ("it is broken; fix it", "failed")

    async def follow() -> list:
        return [data["state"] async for _, data in action_routes._follow(done)]

    assert asyncio.run(follow()) == ["done"]


def test_a_command_that_is_cancelled_ends(monkeypatch) -> None:
    start = action_routes.children.start
    monkeypatch.setattr(action_routes.children, "start", lambda program, **options: start(["sleep", "60"], **options))
    job = action_routes.Jobs().start("sleep", "", action_routes.command([]))
    job.cancelled.set()
    assert finished(job).state == "cancelled"


def client_of_one(manager: RunManager, folder: RunFolder) -> TestClient:
    return client_for(Catalog(manager, [folder]), launcher=FormLauncher(manager, Site()))


def test_a_copy_of_a_run_has_an_id_of_its_own_and_cannot_change_the_original(run, tmp_path) -> None:
    manager = Started(tmp_path / "home")
    list_run(manager.home, "abcd2345", run, state="completed")
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    client = client_of_one(manager, RunFolder(copy))
    copy_id = client.get("/api/runs").json()["runs"][0]["id"]
    assert copy_id != "abcd2345"
    assert {"stop", "resume", "delete"}.isdisjoint(client.get(f"/api/runs/{copy_id}").json()["actions"])
    for run_id in (copy_id, "abcd2345"):
        headers = {"Content-Type": "application/json"}
        assert client.delete(f"/api/runs/{run_id}", headers=headers).status_code >= 400
        assert client.post(f"/api/runs/{run_id}/resume", json={"max_steps": 9}).status_code >= 400
        assert client.post(f"/api/runs/{run_id}/stop", json={}).status_code >= 400
    assert run.record_file.is_file()
    assert manager.get("abcd2345").state == "completed"
    client = client_of_one(manager, run)  # its own dashboard
    (shown,) = client.get("/api/runs").json()["runs"]
    assert shown["id"] == "abcd2345"
    assert client.delete("/api/runs/abcd2345", headers={"Content-Type": "application/json"}).status_code == 200
    assert not run.path.exists()


def test_two_copies_are_two_runs(run, tmp_path) -> None:
    folders = []
    run.index_file.write_text('{"run_id": "abcd2345", "name": "shop"}')
    for name in ("one", "two"):
        shutil.copytree(run.path, tmp_path / name)
        folders.append(RunFolder(tmp_path / name))
    client = client_for(Catalog(RunManager(tmp_path / "home"), folders))
    shown = client.get("/api/runs").json()["runs"]
    assert len({row["id"] for row in shown}) == 2
    for row in shown:
        assert client.get(f"/api/runs/{row['id']}").json()["folder"] == row["folder"]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "7", '{"run_id": "../x"}', '{"run_id": 7, "created": "x"}', '{"created": 1e999}']
)
def test_a_damaged_index_file_does_not_hide_the_run(run, tmp_path, text) -> None:
    run.index_file.write_text(text)
    client = client_for(Catalog(RunManager(tmp_path / "home"), [run]))
    (row,) = client.get("/api/runs").json()["runs"]
    assert row["id"].isalnum()
