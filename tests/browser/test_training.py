"""A training from the first click on: started, watched, stopped, resumed, talked to and exported in the browser."""

import pytest

from palestra.extras.agent_tools.launcher import FormLauncher
from palestra.extras.agent_tools.locks import load_site
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.manager import RunManager

SLOW = pytest.mark.slow("make test-browser trains in the browser")
MEASURES = """
from palestra import measure

@measure
def short_answer(ctx):
    return len(ctx.final_assistant_message.text) < 40
"""
STEPS = "Number(document.querySelector('.stat b').textContent.split('/')[0])"
SETTINGS = {"train.max_steps": "200", "train.problems_per_step": "2", "rollout.group_size": "4", "eval.cases": "4"}


@pytest.fixture
def url(serve_dashboard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measures.py").write_text(MEASURES)
    manager = RunManager(tmp_path / "home")
    yield serve_dashboard(Catalog(manager), launcher=FormLauncher(manager, load_site()))
    for run in manager.list():
        if run.is_active:
            manager.stop(run.run_id)


def fill(page, settings):
    for name, value in settings.items():
        page.type(f'[id="field-{name}"]', value)


@SLOW
@pytest.mark.timeout(900)
def test_a_run_is_started_watched_stopped_resumed_rescored_and_talked_to(page, visit, url, violations) -> None:
    visit(url)
    page.click("a.button", "New run")
    page.wait_for("h1", "New run")
    assert page.evaluate("document.querySelector('[data-locked] input').disabled")
    fill(page, {"train.max_steps": "many"})
    page.wait_for('[data-name="train.max_steps"] .error', "many")
    fill(page, SETTINGS)
    page.wait("!document.querySelector('button[type=submit]').disabled")
    page.click("button", "Start training")

    page.wait_for(".pill", "running", timeout_s=180)
    page.wait(f"{STEPS} >= 2", timeout_s=180)
    page.wait_for(".chart canvas")
    drawn = page.evaluate("document.querySelector('.chart').getAttribute('aria-label')")
    seen = page.evaluate(STEPS)
    page.wait(f"{STEPS} > {seen + 1}", timeout_s=180)  # without a reload
    assert page.evaluate("document.querySelector('.chart').getAttribute('aria-label')") != drawn

    page.click(".tabs a", "Logs")
    page.wait_for(".log", "step")
    lines = page.count(".log > div")
    page.wait(f"document.querySelectorAll('.log > div').length > {lines}", timeout_s=180)  # followed, without a reload
    assert violations() == []
    page.click(".tabs a", "Overview")
    page.wait_for(".chart canvas")

    page.click("button", "Stop")
    page.wait_for(".pill", "stopped", timeout_s=180)
    steps = page.evaluate(STEPS)
    page.click("button", "Resume")
    page.wait_for(".pill", "running", timeout_s=180)
    page.wait(f"{STEPS} > {steps}", timeout_s=180)
    page.click("button", "Stop")
    page.wait_for(".pill", "stopped", timeout_s=180)

    page.click(".tabs a", "Re-score")
    page.type("#measures", "measures.py")
    page.click("button", "Re-score")
    page.wait_for("h2", "scored again", timeout_s=180)
    assert "short_answer" in page.text()
    assert violations() == []
    page.click(".tabs a", "Checkpoints")
    page.click("button", "Export")
    page.wait_for("h2", "Exported", timeout_s=180)
    assert violations() == []

    page.click(".top a", "Runs")
    page.click("tr.open a")
    page.click("button", "Delete")
    page.click("dialog button.danger", "Delete")
    page.wait_for("main", "No runs yet")
