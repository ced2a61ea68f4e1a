"""Repetitive texts of 100 kB from a model, a judge or a file: no parser takes more work than in proportion to them."""

from __future__ import annotations

import contextlib
import json
import random
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzzing.check import Tally
from palestra.core.conversations import read_conversations
from palestra.core.errors import InputError
from palestra.evals.judge import read_verdict
from palestra.evals.rollout_stats import _call_pattern
from palestra.models.chat.callformats import FORMATS, HARMONY, HERMES, CallFormat, parse_assistant
from palestra.models.chat.streaming import StreamedReply
from palestra.models.chat.toolcalls import TAGS, argument_schemas, split_reasoning, strip_reasoning

Parser = Callable[[str], Any]
SIZE = 100_000
QUICK_S = 1.0  # of CPU; what takes less is not compared
GROWTH = 8.0  # the limit for four times the text: 4 is linear, 16 quadratic
PIECE = 50  # characters that arrive together in a stream
STRUCTURAL = "{}[]()<>|/\\\"'`:;,=.- \n\ta1"
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}, "counts": {}}}
TOOLS = [{"type": "function", "function": {"name": "stock", "parameters": SCHEMA}}]
CALL = ("stock", {"item": "red lamp", "counts": [1, {"of": None}]})
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    tally = Tally("model texts")
    inputs = list(all_inputs(folder / "traces.jsonl"))
    slowest: dict[str, tuple[float, str]] = {}
    for name, parse, start, unit in inputs if count >= len(inputs) else rng.sample(inputs, count):
        what = f"{start!r} and {unit!r} repeated"
        seconds = check(tally, f"{name}: {what}", parse, (start + unit * (SIZE // len(unit)))[:SIZE])
        slowest[name] = max(slowest.get(name, (0.0, "")), (seconds, what))
    if count >= len(inputs):
        for name, (seconds, what) in sorted(slowest.items(), key=lambda item: -item[1][0]):
            print(f"  {name}: {seconds:.2f} s of CPU for {what:.120}")
    return tally


def check(tally: Tally, what: str, parse: Parser, text: str) -> float:
    """Parse a text, and a quarter of it if the whole takes long; return the seconds of CPU for the whole."""
    began = time.process_time()
    with tally.watch(what):
        try:
            parse(text)
        except ValueError as error:
            raise InputError("refused") from error
    seconds = time.process_time() - began
    if seconds > QUICK_S:  # the machine may be loaded: the best of several
        quarter = min(cpu_s(parse, text[: SIZE // 4]) for _ in range(3))
        seconds = min(seconds, cpu_s(parse, text))
        if seconds > max(QUICK_S, GROWTH * quarter):
            tally.fault(f"{what}: {quarter:.2f} s of CPU for a quarter of the text, {seconds:.2f} s for all of it")
    return seconds


def cpu_s(parse: Parser, text: str) -> float:
    began = time.process_time()
    with contextlib.suppress(ValueError, InputError):
        parse(text)
    return time.process_time() - began


def all_inputs(file: Path) -> Iterator[tuple[str, Parser, str, str]]:
    """The parser's name, the parser, and the text: a beginning, and what is repeated behind it."""
    singles = [*string.printable, "\ud83d", "｜"]
    pairs = [a + b for a in STRUCTURAL for b in STRUCTURAL if a != b]
    everywhere = [("", unit) for unit in [*singles, *pairs]]
    schemas = argument_schemas(TOOLS)
    for format in FORMATS:
        for start, unit in [*everywhere, *cut_off(format.write([CALL]), STRUCTURAL if format.at_start else " \n{<`")]:
            yield format.name, lambda text, format=format: format.find(text, schemas), start, unit
    tags = [tag for pair in TAGS for tag in pair]
    written = [format.write([CALL]) for format in FORMATS]
    for start, unit in [*everywhere, *(each for text in [*written, *tags] for each in cut_off(text, " ", step=4))]:
        yield "a whole answer", whole_answer, start, unit
    for start, unit in [*everywhere, *(("", tag) for tag in tags), *cut_off(ANALYSIS, " {")]:
        yield (
            "reasoning",
            lambda text: (split_reasoning(text), split_reasoning(text, True), strip_reasoning(text)),
            start,
            unit,
        )
        yield "reasoning", lambda text: strip_reasoning(f"{ANALYSIS}{text}"), start, unit
    for start, unit in [*(("", unit) for unit in singles), *(("", tag + space) for tag in tags for space in ("", " "))]:
        for format in (HERMES, HARMONY):
            yield "a stream", lambda text, format=format: stream(format, text), start, unit
    for start, unit in [*everywhere, *cut_off('</think>{"score": 0.5, "reason": "It is polite."}', STRUCTURAL)]:
        yield "read_verdict", read_verdict, start, unit
        yield "call_pattern", _call_pattern(("stock", "add")).findall, start, unit
    yield from trace_inputs(file, everywhere)


def cut_off(written: str, fill: str, step: int = 1) -> Iterator[tuple[str, str]]:
    """Beginnings and repetitions: one beginning with a character repeated, or a beginning repeated."""
    for end in range(1, len(written) + 1, step):
        for each in fill:
            yield written[:end], each
        yield "", written[:end]
        yield "", written[:end] + fill[0]
        yield "", written[:end] + written[-len(written) // 4 :]


def whole_answer(text: str) -> None:
    parse_assistant(text, HERMES, TOOLS)


def stream(format: CallFormat, text: str) -> None:
    reply = StreamedReply(format, with_tools=True, reasoning_is_open=True)
    for place in range(0, len(text), PIECE):
        list(reply.push(text[place : place + PIECE]))


def trace_inputs(file: Path, everywhere: list[tuple[str, str]]) -> Iterator[tuple[str, Parser, str, str]]:
    """Each trace format with the text where an assistant, a call or a result has one."""
    call = {"id": "1", "type": "function", "function": {"name": "stock", "arguments": "TEXT"}}
    block = {"type": "tool_use", "id": "1", "name": "stock", "input": {}}
    records: dict[str, Any] = {
        "OpenAI": {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": [call]}]},
        "TRL": {"prompt": "Hello", "completion": "TEXT"},
        "Anthropic": {"system": "", "messages": [
            {"role": "user", "content": "TEXT"}, {"role": "assistant", "content": [block]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "TEXT"}]},
        ]},
    }  # fmt: skip
    tagged = [
        f"<{tag}>{inside}</{tag}>" for tag in ("tool_call", "tool_response") for inside in ('{"name": "stock"}', "")
    ]
    inputs = [*everywhere, *(each for text in tagged for each in cut_off(text, ' \n{"'))]
    for name, record in records.items():

        def parse(text: str, written: str = json.dumps(record)) -> None:
            file.write_text(written.replace("TEXT", json.dumps(text)[1:-1]))
            read_conversations(file)

        for start, unit in inputs:
            yield name, parse, start, unit
    for start, unit in [*everywhere, *cut_off(json.dumps(records["TRL"]), ' \n{"')]:
        yield "a file", lambda text: (file.write_text(text, errors="replace"), read_conversations(file)), start, unit
