"""A little of what `make fuzz` does at length: no traceback, no hang, nothing lost."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from fuzzing import check, foreign_runs, gguf_files, http_requests, model_texts, tinker_requests, wire_posts

from palestra.evals.judge import read_verdict
from palestra.evals.rollout_stats import _call_pattern
from palestra.models.chat.callformats import FORMATS, parse_assistant
from palestra.models.chat.toolcalls import split_reasoning


@pytest.mark.parametrize(
    ("fuzzer", "count"),
    [
        (gguf_files, 40),
        (wire_posts, 100),
        (http_requests, 30),
        (tinker_requests, 100),
        (foreign_runs, 8),
        (model_texts, 40),
    ],
)  # fmt: skip
def test_mutated_input_is_refused_or_accepted_and_nothing_else(fuzzer, count, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    tally = fuzzer.fuzz(count, random.Random(7), tmp_path)
    assert tally.faults == []
    assert tally.outcomes["refused"] > 0
    assert tally.outcomes["accepted"] > 0


REPEATED = [  # each took minutes or hours when parsers tried again from each place
    ("hermes", "", "{"),
    ("glm", "<tool_call>add<arg_key>", " "),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>", " "),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>", " "),
    ("harmony", "<|message|>a<|end|>", "a"),
    ("mistral_args", "[TOOL_CALLS]add", " "),
    ("gemma4", "<|tool_call>call:add{", " "),
]


@pytest.mark.parametrize(("name", "start", "unit"), REPEATED)
def test_a_model_that_repeats_itself_costs_its_parser_no_more_than_in_proportion(name, start, unit):
    format = next(each for each in FORMATS if each.name == name)
    assert faults_of(lambda text: parse_assistant(text, format, model_texts.TOOLS), start, unit) == []


def test_repeated_texts_in_verdicts_reasoning_and_trace_files_cost_no_more_than_in_proportion(tmp_path):
    assert faults_of(read_verdict, "", "{" * 100, size=4_000_000) == []
    assert faults_of(split_reasoning, "", "<|channel|>analysis", size=500_000) == []
    assert faults_of(_call_pattern(("add",)).findall, "", "\n") == []
    file = tmp_path / "traces.jsonl"
    inputs = {name: parse for name, parse, _, _ in model_texts.trace_inputs(file, [("", "a")])}
    assert faults_of(inputs["TRL"], "<tool_call>", " ") == []
    assert faults_of(inputs["Anthropic"], "<tool_response>", " ") == []


def faults_of(parse, start, unit, size=model_texts.SIZE):
    tally = check.Tally("texts")
    model_texts.check(tally, start, parse, start + unit * (size // len(unit)))
    return tally.faults


def test_every_fault_is_printed_at_once_also_with_characters_that_no_terminal_takes(capsys):
    tally = check.Tally("texts")
    for number in range(30):
        with tally.watch(f"input {number}"):
            raise ValueError("\ud800 \x1b]0;owned\x07")
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert all(f"  input {number}: ValueError: \\ud800 \\x1b" in shown for number in range(30))
