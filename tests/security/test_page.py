"""SECURITY.md promises nothing that no test shows."""

import re
from pathlib import Path

import pytest

from palestra.faces.rl_tools import RlTools
from palestra.runs.manager import RunManager

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 30
    assert named <= written, sorted(named - written)


@pytest.mark.parametrize(("field", "value"), [("allow_unsandboxed", True), ("isolation", "docker")])
def test_an_agent_cannot_switch_the_sandbox_off(field, value, tmp_path):
    tools = RlTools(RunManager(tmp_path / "home"))
    assert "error" not in tools.call("rl_select_environment", {"name": "shell"})
    refused = tools.call("rl_edit_config", {"field": field, "value": value})
    assert "locked by this site" in refused["error"]
