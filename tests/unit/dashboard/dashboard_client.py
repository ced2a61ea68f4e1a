"""Clients of a dashboard that shows the runs of a folder."""

from pathlib import Path

from starlette.testclient import TestClient

from palestra.core.run_folder import RunFolder
from palestra.dashboard.app import dashboard_app
from palestra.dashboard.catalog import Catalog
from palestra.dashboard.foreign import open_foreign
from palestra.runs.index import run_folders
from palestra.runs.manager import RunManager

ADDRESS = "http://127.0.0.1:8004"


class Api:
    """The API of one run: `api("rollouts", step=2)` is the JSON of a GET."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.path = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"

    def __call__(self, path: str = "", *, status: int = 200, **params):
        response = self.client.get(f"{self.path}/{path}".rstrip("/"), params=params)
        assert response.status_code == status, (path, params, response.text[:500])
        return response.json()

    def rows(self, **params) -> list[dict]:
        return self("rollouts", **({"sort": "oldest", "limit": 200} | params))["rollouts"]


def client_of(path: Path, home: Path, token: str | None = None) -> TestClient:
    app = dashboard_app(Catalog(RunManager(home), list(run_folders(path))), token)
    return TestClient(app, base_url=ADDRESS)


def api_of(run: RunFolder, home: Path) -> Api:
    return Api(client_of(run.path, home))


def foreign_api(path: Path, home: Path) -> Api:
    """The API of a run that another tool made."""
    imported = open_foreign(path)
    assert imported is not None
    return Api(TestClient(dashboard_app(Catalog(RunManager(home), [], [imported])), base_url=ADDRESS))
