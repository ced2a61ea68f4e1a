"""The documentation site builds without a warning, so every link leads somewhere, and the reference is whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_reference_has_every_public_name_command_setting_and_tool(site: Path) -> None:
    import palestra
    from palestra.extras.agent_tools.tools import TOOLS

    api, commands, settings, tools = (
        (site / "reference" / f"{name}.html").read_text(encoding="utf-8") for name in ("api", "cli", "config", "tools")
    )
    shown = set(re.findall(r'id="([\w.]+)"', api))
    assert {name for name in palestra.__all__ if not any(i.endswith(f".{name}") or i == name for i in shown)} == set()
    assert all(f"palestra {name}" in commands for name in ("train", "eval", "runs list", "env run-atropos"))
    assert "<code>train.learning_rate</code>" in settings
    assert all(name in tools for name in TOOLS)


def test_the_front_page_is_the_readme(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "Two commands" in text
    assert 'href="models.html"' in text
