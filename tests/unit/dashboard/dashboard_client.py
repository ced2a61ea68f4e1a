"""A client of a dashboard that shows the runs of a folder."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from palestra.dashboard.app import dashboard_app
from palestra.dashboard.catalog import Catalog, run_folders
from palestra.dashboard.foreign import open_foreign
from palestra.runs.manager import RunManager

ADDRESS = "http://127.0.0.1:8004"


def client_of(path: Path, home: Path, token: str | None = None) -> TestClient:
    app = dashboard_app(Catalog(RunManager(home), list(run_folders(path))), token)
    return TestClient(app, base_url=ADDRESS)


def foreign_client(path: Path, home: Path) -> tuple[TestClient, str]:
    """A client of a dashboard that shows a run of others, and the path of its API."""
    imported = open_foreign(path)
    assert imported is not None
    client = TestClient(dashboard_app(Catalog(RunManager(home), [], [imported])), base_url=ADDRESS)
    return client, f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
