"""Run folders that no training made, and clients of the dashboard that shows them."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "scripts")]

import make_runs  # noqa: E402
from dashboard_client import Api, client_of  # noqa: E402


@pytest.fixture
def run(tmp_path):
    """Three steps of two groups of four."""
    return make_runs.write_run(tmp_path / "runs" / "shop", make_runs.plain_groups(24, per_step=2, size=4))


@pytest.fixture
def client(run, tmp_path):
    with client_of(run.path, tmp_path / "home") as client:  # one event loop for all requests
        yield client


@pytest.fixture
def api(client) -> Api:
    return Api(client)
