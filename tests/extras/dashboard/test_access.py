"""Who is answered: whoever has the token, and no other site, whatever it sends."""

import re
from itertools import product

import pytest
from dashboard_client import ADDRESS, BEARER, TOKEN, client_for, client_of
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient

import palestra.extras.agent_tools.commands as tools_command
import palestra.extras.dashboard.command as dashboard_command
from palestra.cli import main
from palestra.extras.agent_tools.clients import Clients, RlTools
from palestra.extras.agent_tools.launcher import FormLauncher
from palestra.extras.agent_tools.locks import Site
from palestra.extras.agent_tools.mcp_server import http_app
from palestra.extras.dashboard.app import STATIC
from palestra.extras.dashboard.catalog import Catalog
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
    ],
    ids=str,
)
def test_a_request_of_another_site_is_refused_with_any_method(client, headers) -> None:
    for method, path in product(METHODS, PATHS):
        response = client.request(method, path, headers={"Content-Type": "application/json", **headers})
        assert response.status_code == 403, (method, path)


def test_the_own_page_is_answered(client) -> None:
    own = {"Origin": ADDRESS, "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == client.get("/api/runs").status_code == 200


JSON = ("application/json", "application/json; charset=utf-8", "Application/JSON ;charset=utf-8")
NOT_JSON = (
    *("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "", "text/plain; x=json"),
    *("text/plain;application/json", "application/jsonx", "application/json, text/plain", "text/json"),
)


@pytest.mark.parametrize(("kind", "status"), [*((kind, 422) for kind in JSON), *((kind, 415) for kind in NOT_JSON)])
def test_only_a_body_of_json_is_read(changing, kind, status) -> None:
    headers = {"Content-Type": kind}
    assert changing.post("/api/form/check", content='{"unknown": 1}', headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_an_address_that_was_clicked_outside_of_a_page_changes_nothing(changing, method) -> None:
    outside = {"Sec-Fetch-Site": "none", "Content-Type": "application/json"}
    for path in ("/api/form", "/api/form/check", "/api/runs", "/api/runs/x", "/api/runs/x/stop"):
        assert changing.request(method, path, headers=outside).status_code == 403, path
    assert changing.get("/api/runs", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def test_no_get_runs_an_agent_file(changing, tmp_path, monkeypatch) -> None:
    marker, agent_file = tmp_path / "marker", tmp_path / "shop.py"
    agent_file.write_text(f"open({str(marker)!r}, 'w')\nagent = suite = None\n")
    for path in [route.path for route in changing.app._app.routes if "GET" in getattr(route, "methods", ())]:
        if not path.endswith("/events"):  # without an end
            changing.get(path.replace("{run}", "x"), params={"agent_file": str(agent_file), "name": str(agent_file)})
    assert not marker.exists()
    assert changing.get("/api/form", params={"agent_file": str(agent_file)}).status_code == 405


def test_without_the_token_no_page_is_shown_and_in_the_address_it_becomes_a_cookie(run, tmp_path) -> None:
    client = client_of(run.path, tmp_path / "home")
    del client.headers["Authorization"]
    for path in PATHS:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get(path, headers={"Cookie": "palestra_token_8004=wrong"}).status_code == 401
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/api/runs", headers=BEARER).status_code == 200
    response = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "./")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie, "scripts cannot read it"
    assert "samesite=strict" in cookie
    assert cookie.startswith("palestra_token_8004="), "another dashboard of this machine has its own"
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


# The dashboard as a part of `palestra mcp --http`


@pytest.fixture
def changing(tmp_path, monkeypatch) -> TestClient:
    """A client of a dashboard that starts runs, of the folder."""
    monkeypatch.chdir(tmp_path)
    manager = RunManager(tmp_path / "home")
    return client_for(Catalog(manager), launcher=FormLauncher(manager, Site()))


@pytest.fixture
def mounted(changing, tmp_path) -> TestClient:
    """A client without the token."""
    manager = RunManager(tmp_path / "home")
    clients = Clients(lambda: RlTools(manager, Site()))
    return TestClient(http_app(clients, TOKEN, changing.app), base_url=ADDRESS)


def addresses(app, prefix: str = "") -> set[tuple[str, str]]:
    """Method and path of every route, below mounts and guards too."""
    while not hasattr(app, "routes"):
        app = app.app if hasattr(app, "app") else app._app
    found = set()
    for route in app.routes:
        path = prefix + re.sub(r"{[^}]+}", "x", route.path)
        if isinstance(route, Mount) and isinstance(route.app, StaticFiles):
            found |= {("GET", f"{path}/{file.relative_to(STATIC)}") for file in STATIC.rglob("*") if file.is_file()}
        elif isinstance(route, Mount):
            found |= addresses(route.app, path)
        else:
            found |= {(method, path) for method in route.methods or ("GET", "POST", "DELETE")}
    return found


def test_without_the_token_no_path_is_answered(mounted) -> None:
    every = addresses(mounted.app)
    assert {("GET", "/dashboard/static/app.js"), ("POST", "/dashboard/api/runs")} <= every
    assert {
        ("POST", "/tools/x"),
        ("POST", "/mcp"),
        ("GET", "/dashboard/"),
        ("DELETE", "/dashboard/api/runs/x"),
    } <= every
    assert len(every) > 100
    headers = {"Content-Type": "application/json", "Sec-Fetch-Site": "same-origin"}
    statuses = {row: mounted.request(*row, headers=headers).status_code for row in sorted(every)}
    assert {row: status for row, status in statuses.items() if status not in (401, 403)} == {}


@pytest.mark.parametrize("command", [["dashboard"], ["mcp", "--http"]], ids=" ".join)
def test_a_server_without_a_token_makes_a_random_one_and_prints_it(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path))
    monkeypatch.delenv("PALESTRA_TOKEN", raising=False)
    served = []
    for module in (dashboard_command, tools_command):
        monkeypatch.setattr(module, "run_server", lambda *arguments: served.append(arguments))
    assert main.run([*command, "--port", "0"]) == main.run([*command, "--port", "0"]) == 0
    tokens = [re.search(r"/\?token=(\S+)", path)[1] for _, socket, _, path in served if not socket.close()]
    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32
    page = "/" if command == ["dashboard"] else "/dashboard/"
    client = TestClient(served[0][0], base_url=ADDRESS)
    assert client.get(page).status_code == 401
    assert client.get(f"{page}?token={tokens[0]}").status_code == 200


def test_the_tools_and_the_dashboard_are_both_there_each_behind_its_guard(mounted) -> None:
    for path in ("/dashboard/", "/dashboard/api/runs"):
        assert mounted.get(path, headers=BEARER).status_code == 200, path
    assert mounted.post("/tools/rl_list_runs", headers=BEARER).json() == {"runs": [], "count": 0}
    page = mounted.get("/dashboard/", headers=BEARER).text
    assert 'src="/' not in page, "addresses are relative to the page"
    assert 'href="/' not in page
    assert mounted.get("/dashboard", headers=BEARER).status_code == 200  # redirected
    answer = mounted.get(f"/dashboard/?token={TOKEN}", follow_redirects=False)  # the cookie is for the dashboard alone
    assert answer.headers["location"] == "./"
    assert "path=/dashboard" in answer.headers["set-cookie"].lower()
    assert mounted.get("/dashboard/api/runs").status_code == 200
    assert mounted.get("/tools").status_code == 401
