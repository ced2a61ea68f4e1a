"""A real browser, and dashboards for it to look at. Without a Chromium these tests are skipped, each by its name."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from chromium import Chromium, find_chromium

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
# `make test-browser` saves those of docs/dashboard.md; tests change the working folder
SCREENSHOTS = os.environ.get("PALESTRA_SCREENSHOTS") and Path(os.environ["PALESTRA_SCREENSHOTS"]).resolve()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if find_chromium() is None:
        pytest.skip("no Chromium on this machine; `make test-browser` installs it, or name it in PALESTRA_CHROMIUM")
    pytest.importorskip("websockets", reason="the driver needs websockets: pip install palestra[browser]")
    with Chromium.start(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture
def page(browser):
    """A tab. Whatever the test did, nothing may have gone wrong in the console."""
    with browser.page() as page:
        page.dark(False)
        yield page
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 20))")  # what is under way reports its errors
        assert page.errors == []


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory) -> Path:
    """The folder of a training of the demo, from a terminal."""
    from palestra.cli.main import run

    folder = tmp_path_factory.mktemp("demo") / "demo"
    assert run(["train", "--folder", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def serve_dashboard(serve):
    """serve_dashboard(catalog): the address of a dashboard, with its token."""
    from palestra.extras.dashboard.app import dashboard_app

    return lambda catalog, **options: serve(dashboard_app(catalog, "a-token", **options)) + "/?token=a-token"


@pytest.fixture
def visit(page):
    """visit(url, "#/runs"): goes there and waits until the page is shown."""

    def go(url: str, place: str = "#/runs") -> None:
        page.open(url + place)
        page.wait(f"document.getElementById('main')?.dataset.shown === {json.dumps(place)}")

    return go


@pytest.fixture
def violations(page):
    """What axe-core finds wrong with the page as it is: one line a rule, with the first element."""

    def check(*rules: str) -> list[str]:
        if not page.evaluate("'axe' in window"):
            page.evaluate(AXE.read_text(encoding="utf-8") + ";true")
        options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
        found = page.evaluate(f"axe.run(document, {json.dumps(options)}).then((r) => r.violations)")
        return [f"{v['id']}: {v['help']}: {v['nodes'][0]['html'][:160]} ({len(v['nodes'])})" for v in found]

    return check


@pytest.fixture
def picture(page):
    """picture("runs"): the window for the docs, where screenshots are asked for."""

    def save(name: str) -> None:
        assert "cannot be shown" not in page.text(), name
        if SCREENSHOTS:
            page.screenshot(SCREENSHOTS / f"{name}.webp")

    return save
