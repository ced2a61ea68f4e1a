"""`palestra bench`: three ways to sample, side by side."""

import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from palestra.extras.bench.command import _table
from palestra.extras.bench.workload import SIDES, TOOL_RESULT_TOKENS, Measurement, Workload

SMALL = ("--prompts", "2", "--group-size", "3", "--prompt-tokens", "20", "--new-tokens", "5", "--threads", "1")
ROLLOUTS, PROMPT, NEW = 6, 20, 5


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_side_samples_the_same_and_the_engine_computes_each_token_once(cli, tmp_path):
    answer = cli.ok("bench", *SMALL, "--tool-rounds", "2", "--json", "--plot", "bench.svg")
    assert answer.out.count("\n") == 1
    summary = json.loads(answer.out)
    assert summary["model"] == "palestra/tiny"
    assert summary["threads"] == 1
    single, tools = summary["scenarios"]["single turn"], summary["scenarios"]["2 tool rounds"]
    assert {single[side]["sampled_tokens"] for side in SIDES} == {ROLLOUTS * NEW}
    assert {tools[side]["sampled_tokens"] for side in SIDES} == {ROLLOUTS * NEW * 3}

    # A prompt's tokens but the last are computed once for its group; the last sampled token of all is never fed.
    shared, own = 2 * (PROMPT - 1), ROLLOUTS * (1 + NEW - 1)
    assert single["engine"]["computed_tokens"] == shared + own
    assert tools["engine"]["computed_tokens"] == shared + own + ROLLOUTS * 2 * (TOOL_RESULT_TOKENS + NEW)
    # The others compute each turn from its first token on.
    turns = [PROMPT + NEW - 1 + i * (TOOL_RESULT_TOKENS + NEW) for i in range(3)]
    for side in ("plain", "generate"):
        assert single[side]["computed_tokens"] == ROLLOUTS * turns[0]
        assert tools[side]["computed_tokens"] == ROLLOUTS * sum(turns)
        ratio = tools[side]["computed_tokens"] / tools["engine"]["computed_tokens"]
        assert tools[f"engine_to_{side}"]["computed_tokens"] == pytest.approx(ratio, abs=1e-3)
        assert tools[side]["tokens_per_s"] > 0
        assert tools[side]["cpu_s"] > 0

    svg = ET.fromstring((tmp_path / "bench.svg").read_text())
    rects = svg.findall("{http://www.w3.org/2000/svg}rect")
    assert len(rects) == 2 * 2 * len(SIDES)
    assert "http" not in (tmp_path / "bench.svg").read_text().replace("http://www.w3.org/2000/svg", "")


def test_plain_lines_without_a_terminal(cli):
    answer = cli.ok("bench", *SMALL, "--tool-rounds", "0")
    lines = answer.out.splitlines()
    assert len(lines) == 1 + len(SIDES) + 2
    assert lines[0].startswith("palestra/tiny on cpu, 1 thread: 2 prompts of 20 tokens × 3 rollouts")
    for line, side in zip(lines[1:], SIDES, strict=False):
        assert line.startswith(f"single turn: {side}  ")
        assert "tokens/s" in line
    assert lines[-1].startswith("single turn: engine against generate: ")


def test_the_table_has_a_row_for_each_side():
    sides = {
        side: Measurement(side, wall_s=2.0, cpu_s=1.5, sampled_tokens=4000, computed_tokens=9000) for side in SIDES
    }
    console = Console(width=100)
    with console.capture() as shown:
        console.print(_table({"single turn": sides}))
    row = next(line for line in shown.get().splitlines() if "generate" in line)
    work = Workload(prompt_tokens=10, new_tokens=5, tool_rounds=2)
    assert work.longest_rollout == 10 + 3 * 5 + 2 * TOOL_RESULT_TOKENS
    assert [cell.strip() for cell in row.split("│")][2:8] == ["generate", "2,000", "1.50", "5,000", "4,000", "9,000"]
