"""docs/agent_tools.md keeps its word: its snippets are valid, its names exist, its site file is read."""

import json
import re
from pathlib import Path

import yaml

from palestra.extras.agent_tools import TOOL_NAMES
from palestra.extras.agent_tools.locks import RequestLimits, Site

PAGE = (Path(__file__).parents[2] / "docs" / "agent_tools.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.+?)```", PAGE, re.DOTALL)


def test_snippets_for_clients_are_json_that_starts_palestra_mcp():
    snippets = [json.loads(block) for block in blocks("json")]
    assert [next(iter(s.values()))["palestra"]["args"] for s in snippets] == [["mcp"], ["mcp"]]


def test_the_table_names_the_ten_tools():
    assert tuple(re.findall(r"^\| `(rl_\w+)`", PAGE, re.MULTILINE)) == TOOL_NAMES


def test_the_site_file_is_read_and_names_every_limit_with_its_default():
    (block,) = blocks("yaml")
    assert Site.model_validate(yaml.safe_load(block)).limits == RequestLimits()
    assert yaml.safe_load(block)["limits"].keys() == RequestLimits.model_fields.keys()
