"""Clients of a dashboard that shows the runs of a folder."""

from pathlib import Path

from starlette.testclient import TestClient

from palestra.core.run_folder import RunFolder
from palestra.extras.dashboard.app import dashboard_app
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.index import run_folders
from palestra.runs.manager import RunManager

ADDRESS = "http://127.0.0.1:8004"
TOKEN = "a-token-of-this-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


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


def client_for(catalog: Catalog, **options) -> TestClient:
    """A client that sends the token."""
    return TestClient(dashboard_app(catalog, TOKEN, **options), base_url=ADDRESS, headers=BEARER)


def client_of(path: Path, home: Path) -> TestClient:
    return client_for(Catalog(RunManager(home), list(run_folders(path))))


def api_of(run: RunFolder, home: Path) -> Api:
    return Api(client_of(run.path, home))
