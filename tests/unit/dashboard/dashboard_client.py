"""A client of a dashboard that shows the runs of a folder."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from palestra.dashboard.app import dashboard_app
from palestra.dashboard.catalog import Catalog, run_folders
from palestra.runs.manager import RunManager

ADDRESS = "http://127.0.0.1:8004"


def client_of(path: Path, home: Path, token: str | None = None) -> TestClient:
    app = dashboard_app(Catalog(RunManager(home), list(run_folders(path))), token)
    return TestClient(app, base_url=ADDRESS)
