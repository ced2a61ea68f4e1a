"""SECURITY.md promises nothing that no test shows."""

import re
from pathlib import Path

import pytest

from palestra.extras.agent_tools import RlTools, mcp_server
from palestra.extras.agent_tools.clients import MAX_SESSIONS
from palestra.extras.atropos import server, task
from palestra.extras.atropos.protocol import MAX_VALUE
from palestra.models.chat.encode import RENDER_S
from palestra.runs.manager import RunManager
from palestra.servers import connections, web
from palestra.servers.gateway import app
from palestra.servers.openai import completer
from palestra.servers.openai.inference import MAX_PROMPTS

ROOT = Path(__file__).parents[2]


@pytest.mark.extras
def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 30
    assert named <= written, sorted(named - written)


@pytest.mark.extras
def test_the_limits_that_the_pages_name_are_those_of_the_code():
    def says(page: str, *sentences: str) -> None:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert [sentence for sentence in sentences if sentence not in text] == []

    says(
        "docs/wire.md",
        f"no whole header within {connections._HEADERS_S:g} s, or nothing of a body for {web._SILENCE_S:g} s",
        f"up to {connections._MAX_CONNECTIONS:,} connections",
        f"up to {MAX_PROMPTS:,} completions (prompts × n) and {completer._MAX_TOKENS >> 20} M prompt tokens × n",
        f"in {app.MAX_BODY >> 20} MiB",
        f"Bodies above {server._LARGE >> 20} MiB",
        f"go up to {MAX_VALUE:g}".replace("e+", "e"),
        f"at most {task._MAX_LOG_BYTES >> 20} MiB",
    )
    says(
        "docs/agent_tools.md",
        f"keep {MAX_SESSIONS:,} sessions",
        {86400.0: "a session ends after a day without a request"}[mcp_server._SESSION_IDLE_S],
    )
    says("SECURITY.md", f"a chat template has {RENDER_S:g} s")


def test_an_agent_cannot_switch_the_sandbox_off(tmp_path):
    tools = RlTools(RunManager(tmp_path / "home"))
    assert "error" not in tools.call("rl_select_environment", {"name": "shell"})
    refused = tools.call("rl_edit_config", {"field": "allow_unsandboxed", "value": True})
    assert "locked by this site" in refused["error"]
