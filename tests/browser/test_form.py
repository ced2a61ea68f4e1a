"""The form that starts a run, over a launcher that starts nothing: what is shown, checked and sent."""

from typing import Any

import make_runs
import pytest

from palestra.core.errors import PalestraError
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.manager import RunManager

pytestmark = pytest.mark.slow("make test-browser drives a Chromium")

FIELDS = [
    {"name": "train.max_steps", "section": "train", "kind": "integer", "value": 24, "default": 24, "common": True},
    {"name": "train.loss", "section": "train", "kind": "choice", "value": "dapo", "choices": ["dapo", "grpo"]},
    {"name": "env.label", "section": "env", "kind": "text", "value": "<b>bold</b>", "common": True},
    {"name": "train.mask_truncated", "section": "train", "kind": "boolean", "value": True},
]
ENVIRONMENT = {"name": "calculator", "description": "Arithmetic.", "file": "calculator.py", "origin": "built-in"}


class FakeLauncher:
    """Remembers what it was asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.started: list[Any] = []

    def environments(self):
        return {"environments": [ENVIRONMENT], "errors": {"broken.py": "SyntaxError"}, "agents": ["shop.py"]}

    def environment(self, name):
        return {**ENVIRONMENT, "docs": "Work it out.", "dialect": "palestra", "tools": None}

    def form(self, body):
        settings = [{"description": "", "choices": None, "common": False, **field} for field in FIELDS]
        locked = [{"name": "server.timeout", "value": 3600, "description": "seconds"}]
        return {"subject": body.environment or body.agent_file, "fields": settings, "locked": locked}

    def check(self, body):
        return {} if str(body.values.get("train.max_steps", 1)).isdigit() else {"train.max_steps": "expected a number"}

    def start(self, body):
        if body.environment is None:
            raise PalestraError("the queue is full; wait for a run to end")
        self.started.append((body.environment, body.values, body.name))
        return self._catalog.all()[0].run

    def test(self, body, progress, cancelled):
        progress(1, 2, "sampling")
        step = {"step": 1, "completions": 4, "correct": 2, "scores": [1.0, 0.0, 1.0, 0.0]}
        return {
            "results": [{"model": "palestra/tiny", "accuracy": 0.5, "mean_score": 0.5, "seconds": 1.0, "steps": [step]}]
        }


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    folder = make_runs.write_run(tmp_path_factory.mktemp("runs") / "shop", make_runs.plain_groups(8, size=4))
    return FakeLauncher(Catalog(RunManager(tmp_path_factory.mktemp("home")), [folder]))


@pytest.fixture(scope="module")
def url(launcher, serve_dashboard):
    return serve_dashboard(launcher._catalog, launcher=launcher)


def test_the_form_sends_only_what_was_changed(page, visit, url, launcher) -> None:
    visit(url, "#/start?environment=calculator")
    assert page.evaluate("document.querySelector('[id=\"field-env.label\"]').value") == "<b>bold</b>"
    assert page.evaluate("document.querySelector('[data-locked=\"server.timeout\"] input').disabled")
    page.type('[id="field-train.max_steps"]', "7")
    page.type("#run-name", "mine")
    page.click("button", "Start training")
    page.wait_for("h1", "shop")
    assert launcher.started == [("calculator", {"train.max_steps": "7"}, "mine")]


def test_a_wrong_value_is_told_at_its_field_and_cannot_be_sent(page, visit, url) -> None:
    visit(url, "#/start?environment=calculator")
    page.type('[id="field-train.max_steps"]', "many")
    page.wait_for('[data-name="train.max_steps"] .error', "expected a number")
    assert page.evaluate("document.querySelector('button[type=submit]').disabled")
    page.type('[id="field-train.max_steps"]', "8")
    page.wait("!document.querySelector('button[type=submit]').disabled")


def test_a_refusal_of_the_server_is_told(page, visit, url) -> None:
    visit(url, "#/start?agent_file=shop.py")
    assert not page.evaluate("document.querySelector('form')")  # reading the file runs it, so somebody has to ask
    page.click("button", "Read shop.py")
    page.click("button", "Start training")
    page.wait_for(".toast", "the queue is full")
    page.errors.clear()  # the browser reports every answer of 400


def test_an_environment_is_tested_with_one_click(page, visit, url) -> None:
    visit(url, "#/environments")
    assert "SyntaxError" in page.text()
    page.click("h2 a", "calculator")
    page.wait_for(".docs", "Work it out.")
    page.click("button", "Test")
    page.wait_for("table", "2 of 4")


PLACES = ("#/start?environment=calculator", "#/environments", "#/environments/calculator")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_wrong_with_the_form(page, visit, url, violations, dark) -> None:
    page.dark(dark)
    for place in PLACES:
        visit(url, place)
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert violations() == [], place


def test_the_form_does_not_scroll_sideways_on_a_phone(page, visit, url) -> None:
    page.size(390, 844, phone=True)
    for place in PLACES:
        visit(url, place)
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
