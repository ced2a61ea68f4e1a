"""The pictures of docs/dashboard.md, from a training of the demo that was started in the browser itself."""

import os
import shutil
from urllib.parse import quote

import make_runs
import pytest

from palestra.extras.agent_tools.launcher import FormLauncher
from palestra.extras.agent_tools.locks import load_site
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.manager import RunManager

pytestmark = pytest.mark.slow("make test-browser drives a Chromium")


IS_READ = "!document.body.innerText.includes('Reading the rollouts')"
MEASURES = """
from palestra import measure

@measure
def looked_up_first(ctx):
    return bool(ctx.tool_calls) and ctx.tool_calls[0].name == "price"
"""


@pytest.fixture
def url(serve_dashboard, tmp_path, demo_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measures.py").write_text(MEASURES)
    shutil.copytree(demo_run, tmp_path / "runs" / "demo")
    weights = {"contains_word": 1.0, "true_answer": 0.0}
    make_runs.write_run(tmp_path / "runs" / "hacked", make_runs.hacked_groups(24), reward_weights=weights)
    manager = RunManager(tmp_path / "home")
    return serve_dashboard(Catalog(manager), launcher=FormLauncher(manager, load_site()))


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get("PALESTRA_SCREENSHOTS"), reason="make test-browser takes the screenshots")
def test_every_page_has_its_picture(page, visit, url, picture) -> None:
    visit(url, "#/start?agent_file=demo")
    picture("start")
    page.type('[id="field-run.seed"]', "1")
    page.wait("!document.querySelector('button[type=submit]').disabled")
    page.click("button", "Start training")
    page.wait("Number(document.querySelector('.stat b')?.textContent.split('/')[0]) >= 12", timeout_s=500)
    picture("live")
    page.wait_for(".pill", "completed", timeout_s=500)
    run = page.evaluate("location.hash")
    page.click(".tabs a", "Rollouts")
    page.wait_for("tr.open")
    page.wait(IS_READ, timeout_s=180)
    picture("rollouts")
    api = f"fetch('api{run[1:]}/rollouts?sort=-advantage&limit=1').then((r) => r.json())"
    best = page.evaluate(f"{api}.then((found) => found.rollouts[0])")
    flips = page.evaluate(f"fetch('api{run[1:]}/evaluations').then((r) => r.json()).then((found) => found.flips)")
    pages = {
        "runs": "#/runs",
        "run": run,
        "rollout": f"{run}/rollouts/{best['id']}",
        "group": f"{run}/groups/{best['group']}",
        "problems": f"{run}/problems",
        "problem": f"{run}/problems/{quote(flips['problems'][-1]['problem_id'], safe='')}?kind=after",
        "config": f"{run}/config",
        "evaluations": f"{run}/evaluations",
        "checkpoints": f"{run}/checkpoints",
        "environments": "#/environments",
    }
    for name, place in pages.items():
        visit(url, place)
        picture(name)

    visit(url, f"{run}/logs")
    page.wait_for(".log", "step 24/24")
    picture("logs")
    visit(url, f"{run}/rescore")
    page.type("#measures", "measures.py")
    page.click("button", "Re-score")
    page.wait_for("h2", "scored again", timeout_s=180)
    picture("rescore")

    page.size(1280, 1060)
    visit(url, f"{run}/rollouts/{best['id']}?view=tokens&column=entropy")
    page.click("[data-jump]")
    page.wait_for(".token-tip")
    picture("tokens")

    page.dark(True)
    visit(url, run)
    picture("run-dark")
    page.size(390, 844, phone=True)
    visit(url, f"{run}/rollouts/{best['id']}")
    picture("rollout-phone")

    page.dark(False)
    page.size(1280, 860)
    visit(url)
    page.click("tr.open a", "hacked")
    page.click(".tabs a", "Is it cheating?")
    page.wait_for("[role=alert]")
    picture("cheating")
