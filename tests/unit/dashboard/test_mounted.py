"""The dashboard as a part of `palestra http`."""

from __future__ import annotations

import pytest
from dashboard_client import ADDRESS
from starlette.testclient import TestClient

from palestra.dashboard.app import dashboard_app
from palestra.dashboard.catalog import Catalog
from palestra.faces.http_api import http_app
from palestra.faces.rl_tools.tools import Clients, RlTools
from palestra.runs.locks import Site
from palestra.runs.manager import RunManager


@pytest.fixture(params=[None, "secret"])
def token(request) -> str | None:
    return request.param


@pytest.fixture
def client(tmp_path, token) -> TestClient:
    manager = RunManager(tmp_path)
    clients = Clients(lambda: RlTools(manager, Site()))
    return TestClient(http_app(clients, token, dashboard_app(Catalog(manager), token)), base_url=ADDRESS)


def test_the_tools_and_the_dashboard_are_both_there_each_behind_its_guard(client, token) -> None:
    paths = ("/dashboard/", "/dashboard/api/runs", "/tools", "/openapi.json")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for path in paths:
        assert client.get(path, headers=headers).status_code == 200, path
        assert client.get(path, headers={**headers, "Sec-Fetch-Site": "cross-site"}).status_code == 403 or token
        if token is not None:
            assert client.get(path).status_code == 401


def test_the_cookie_is_for_the_dashboard_alone(client, token) -> None:
    if token is None:
        return
    answer = client.get(f"/dashboard/?token={token}", follow_redirects=False)
    assert answer.headers["location"] == "./"
    assert "path=/dashboard" in answer.headers["set-cookie"].lower()
    assert client.get("/dashboard/api/runs").status_code == 200
    assert client.get("/tools").status_code == 401


def test_the_page_names_only_addresses_relative_to_itself(client, token) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    page = client.get("/dashboard/", headers=headers).text
    assert 'src="/' not in page
    assert 'href="/' not in page
    assert client.get("/dashboard", headers=headers).status_code == 200  # redirected
