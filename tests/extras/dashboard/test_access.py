"""Who is answered: this machine's own page, or whoever has the token; no other site, whatever it sends."""

from itertools import product

import pytest
from dashboard_client import ADDRESS, client_of
from starlette.testclient import TestClient

from palestra.extras.agent_tools.http_api import http_app
from palestra.extras.agent_tools.tools import Clients, RlTools
from palestra.extras.dashboard.app import dashboard_app
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.locks import Site
from palestra.runs.manager import RunManager

PATHS = ("/", "/static/app.js", "/api/runs", "/api/status", "/api/runs/x/events")
OUTSIDE = ("/static/../app.py", "/static/../../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000"},  # another server of this machine
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8004"},
        {"Host": ""},
    ],
    ids=str,
)
def test_a_request_of_another_site_is_refused_with_any_method(client, headers) -> None:
    for method, path in product(METHODS, PATHS):
        response = client.request(method, path, headers={"Content-Type": "application/json", **headers})
        assert response.status_code == 403, (method, path)


def test_the_own_page_is_answered_and_a_form_of_html_cannot_change_anything(client, api) -> None:
    own = {"Origin": ADDRESS, "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == client.get("/api/runs").status_code == 200
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""):
        assert client.post(f"{api.path}/stop", content="{}", headers={"Content-Type": kind}).status_code == 415


def test_without_the_token_no_page_is_shown_and_in_the_address_it_becomes_a_cookie(run, tmp_path) -> None:
    client = client_of(run.path, tmp_path / "home", token="secret")
    for path in PATHS:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get(path, headers={"Cookie": "palestra_token=wrong"}).status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
    response = client.get("/?token=secret", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "./")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie, "scripts cannot read it"
    assert "samesite=strict" in cookie
    assert client.get("/api/runs").status_code == 200  # the client keeps cookies
    crossed = {"Origin": "https://evil.example"}
    assert client.get("/api/runs", headers=crossed).status_code == 403  # the cookie alone is not enough


@pytest.mark.parametrize("path", [*PATHS, "/nothing", *OUTSIDE])
def test_every_answer_has_the_security_headers(client, path) -> None:
    response = client.get(path)
    policy = response.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.status_code == 404 or ".." not in path, "static files stay in their folder"


# The dashboard as a part of `palestra http`


@pytest.fixture(params=[None, "secret"])
def token(request) -> str | None:
    return request.param


@pytest.fixture
def mounted(tmp_path, token) -> TestClient:
    manager = RunManager(tmp_path)
    clients = Clients(lambda: RlTools(manager, Site()))
    return TestClient(http_app(clients, token, dashboard_app(Catalog(manager), token)), base_url=ADDRESS)


def test_the_tools_and_the_dashboard_are_both_there_each_behind_its_guard(mounted, token) -> None:
    paths = ("/dashboard/", "/dashboard/api/runs", "/tools", "/openapi.json")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for path in paths:
        assert mounted.get(path, headers=headers).status_code == 200, path
        assert mounted.get(path, headers={**headers, "Sec-Fetch-Site": "cross-site"}).status_code == 403 or token
        if token is not None:
            assert mounted.get(path).status_code == 401
    page = mounted.get("/dashboard/", headers=headers).text
    assert 'src="/' not in page, "addresses are relative to the page"
    assert 'href="/' not in page
    assert mounted.get("/dashboard", headers=headers).status_code == 200  # redirected
    if token is not None:  # the cookie is for the dashboard alone
        answer = mounted.get(f"/dashboard/?token={token}", follow_redirects=False)
        assert answer.headers["location"] == "./"
        assert "path=/dashboard" in answer.headers["set-cookie"].lower()
        assert mounted.get("/dashboard/api/runs").status_code == 200
        assert mounted.get("/tools").status_code == 401
