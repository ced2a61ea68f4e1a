"""The report of the demo in a real browser: the picture on the front page."""

import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("make test-browser trains the demo")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "report.webp"
SCREENSHOTS = os.environ.get("PALESTRA_SCREENSHOTS")


def test_the_demo_reports_that_the_agent_got_better(page, demo_run: Path, tmp_path: Path) -> None:
    page.size(1240, 1120)
    page.open((demo_run / "report.html").as_uri())
    page.wait_for("h1", "shop-assistant")
    assert "held-out attempts pass, before and after training" in page.evaluate("document.body.textContent")
    page.screenshot(tmp_path / PICTURE.name)
    if SCREENSHOTS:
        shutil.copy(tmp_path / PICTURE.name, PICTURE)
