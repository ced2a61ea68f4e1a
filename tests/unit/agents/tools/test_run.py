import asyncio
import enum
import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from palestra.agents.tools.run import find_mismatch, run_calls
from palestra.agents.tools.tool import Tool, function_tool
from palestra.core.types import ToolCall


class Unit(enum.Enum):
    KILO = "kg"
    GRAM = "g"


@dataclass
class Parcel:
    weight: float
    unit: Unit = Unit.KILO


@function_tool
def price(item: str, count: int = 1, discount: float = 0.0) -> float:
    """Look a price up."""
    return 2.0 * count - discount


@function_tool
def post(parcel: Parcel, units: list[Unit] | None = None) -> dict[str, object]:
    """Send a parcel."""
    assert isinstance(parcel, Parcel)
    return {"parcel": parcel, "units": units, "straße": "Löwe"}


@function_tool
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


RELEASED = threading.Event()


@function_tool
def block(seconds: float) -> str:
    """Wait without giving way."""
    RELEASED.wait(seconds)
    return "done"


ALL_MET, MAY_GO = threading.Barrier(41), threading.Event()


@function_tool
def meet() -> str:
    """Wait for the concurrent calls, then for the event loop."""
    ALL_MET.wait(60)
    assert MAY_GO.wait(60)
    return "done"


@function_tool
async def release() -> str:
    """Release the threads once all of them wait, which shows that the event loop is free."""
    while ALL_MET.n_waiting < 40:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(ALL_MET.wait, 60)
    MAY_GO.set()
    return "done"


@function_tool
def explode(kind: str) -> str:
    """Fail."""
    match kind:
        case "value":
            raise ValueError("no such thing " * 100)
        case "exit":
            sys.exit(3)
        case "stop":
            raise StopIteration
        case "interrupt":
            raise KeyboardInterrupt
    raise RuntimeError


@function_tool
def dump() -> str:
    """Give far too much."""
    return "x" * 10_000_000


@function_tool
def broken_text() -> str:
    """Give half a character."""
    return "a\ud800b"


@function_tool
def picture() -> bytes:
    """Give a picture."""
    return b"\xff\xd8"


@function_tool
def send(parcel: Parcel | None = None, count: int | str | None = None, others: list[Parcel] | None = None) -> str:
    """Send it."""
    return "sent"


TOOLS = {
    tool.name: tool for tool in (price, post, wait, block, meet, release, explode, dump, broken_text, picture, send)
}


def run(*calls: tuple[str, dict], timeout_s: float = 5.0):
    made = [ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
    return asyncio.run(run_calls(TOOLS, made, timeout_s))


def run_one(name: str, timeout_s: float = 5.0, **arguments):
    return run((name, arguments), timeout_s=timeout_s)[0]


def test_results_come_in_the_order_of_the_calls():
    (none,) = asyncio.run(run_calls({}, [ToolCall("c", "price")], 1))
    assert none.content == "Error: there is no tool 'price'. There are no tools."
    slow, fast = run(("wait", {"seconds": 0.1}), ("price", {"item": "tea", "count": 2}))
    assert (slow.content, fast.content) == ("done", "4.0")
    assert slow.call.id == "call_0"
    assert slow.seconds >= 0.1


def test_all_calls_of_a_turn_run_at_once_and_the_loop_stays_free():
    results = run(*[("meet", {})] * 40, ("release", {}), timeout_s=120.0)
    assert all(result.ok for result in results), results[0].content


def test_values_that_are_not_text_become_json():
    result = run_one("post", parcel={"weight": 2, "unit": "g"}, units=["kg"])
    assert result.ok, result.content
    parcel = {"weight": 2.0, "unit": "g"}
    assert json.loads(result.content) == {"parcel": parcel, "units": ["kg"], "straße": "Löwe"}
    assert "Löwe" in result.content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "missing argument 'item'"),
        ({"item": "tea", "cont": 2}, "unknown argument 'cont' (Did you mean 'count'?)"),
        ({"item": "tea", "count": "2"}, "'count'"),
        ({"item": "tea", "count": 2.5}, "'count'"),
        ({"item": "tea", "count": True}, "'count'"),
        ({"item": 3}, "'item'"),
        ({"item": None}, "'item'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told_to_the_model(arguments, words):
    result = run_one("price", **arguments)
    assert not result.ok
    assert result.content.startswith("Error: ")
    assert words in result.content
    assert "price takes item: string, count: integer (optional)" in result.content


TYPES = (
    "parcel: object or null (optional), count: integer or string or null (optional), others: array or null (optional)"
)


@pytest.mark.parametrize(
    ("call", "words", "raised"),
    [
        (ToolCall("c", "price", {"item": "tea", "discount": 1}), "1.0", False),
        (ToolCall("c", "post", {"parcel": {"weight": "heavy"}}), "'parcel'['weight']", False),
        (ToolCall("c", "", error="not valid JSON"), "Error: not valid JSON", False),
        (ToolCall("c", "prize"), "no tool 'prize'. Did you mean 'price'? The tools are: price, post,", False),
        (ToolCall("c", "dump"), "x\n[cut off: these are the first 1000 of 10000000 characters]", False),
        (ToolCall("c", "broken_text"), "a?b", False),
        (ToolCall("c", "picture"), "picture returned bytes, which has no text form (UnicodeDecodeError", True),
        (ToolCall("c", "send", {"count": []}), f"send takes {TYPES}", False),
    ],
    ids=["int for float", "inside", "malformed", "unknown tool", "huge", "half a character", "no text", "types"],
)
def test_what_the_model_reads(call, words, raised):
    (result,) = asyncio.run(run_calls(TOOLS, [call], 5, max_result_chars=1000))
    assert words in result.content
    assert len(result.content) < 1100
    assert result.raised == raised
    assert result.ok != ("Error" in result.content)


@pytest.mark.parametrize("kind", ["value", "exit", "stop", "interrupt", "other"])
def test_a_tool_that_raises_is_answered_shortly(kind):
    result = run_one("explode", kind=kind)
    assert not result.ok
    assert result.content.startswith("Error: explode raised ")
    assert len(result.content) < 320
    assert result.raised


@pytest.mark.parametrize(("name", "words"), [("wait", " and was stopped"), ("block", "")])
def test_a_tool_past_its_time_is_answered(name, words):
    result = run_one(name, seconds=2.0, timeout_s=0.05)
    RELEASED.set()  # so that its thread is free again
    RELEASED.clear()
    assert (result.ok, result.content) == (False, f"Error: {name} took longer than 0.05 s{words}")
    assert result.seconds < 1.5


def test_a_cancellation_passes_through():
    async def cancel_it():
        task = asyncio.create_task(run_calls(TOOLS, [ToolCall("c", "wait", {"seconds": 30})], 60))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_it())


def test_a_hung_tool_does_not_keep_the_process_from_ending():
    script = """
import asyncio, time
from palestra.core.types import ToolCall
from palestra.agents.tools.run import run_calls
from palestra.agents.tools.tool import function_tool

def hang() -> str:
    'Hang.'
    time.sleep(600)

print(asyncio.run(run_calls({"hang": function_tool(hang)}, [ToolCall("c", "hang")], 0.05))[0].content)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "took longer" in ended.stdout
    assert ended.stderr == ""


RAW = Tool(
    "raw",
    "A tool with a schema of its own.",
    {
        "type": "object",
        "properties": {
            "mode": {"enum": ["a", "b"]},
            "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/Place"},
            "anything": {},
        },
        "required": ["mode"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"type": "number"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    lambda **arguments: arguments,
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "a", "size": None, "tags": ["x"], "place": {"x": 1}, "anything": [{}]}, None),
        ({"mode": "c"}, "argument 'mode': \"c\" is not one of ['a', 'b']"),
        ({"mode": "a", "size": "3"}, "\"3\" is not of type 'integer'"),
        ({"mode": "a", "size": True}, "true is not of type 'integer'"),
        ({"mode": "a", "size": 3.0}, "3.0 is not of type 'integer'"),
        ({"mode": "a", "tags": ["x", 1]}, "argument 'tags': [1] 1 is not of type 'string'"),
        ({"mode": "a", "tags": "x"}, "is not of type 'array'"),
        ({"mode": "a", "place": {"x": "1"}}, "['x'] \"1\" is not of type 'number'"),
        ({"mode": "a", "place": {}}, "'x' is a required property"),
        ({"mode": "a", "place": {"x": 1, "y": 2}}, "('y' was unexpected)"),
        ({"mode": "a", "moed": 1}, "unknown argument 'moed'"),
    ],
    ids=str,
)
def test_a_bare_json_schema_is_checked_too(arguments, words):
    result = asyncio.run(run_calls({"raw": RAW}, [ToolCall("c", "raw", arguments)], 5))[0]
    if words is None:
        assert result.ok, result.content
        assert json.loads(result.content) == arguments
    else:
        assert not result.ok
        assert words in result.content


def test_a_slow_pattern_of_a_schema_is_not_run_and_nothing_is_downloaded():
    slow = "^(a+)+$"
    for schema, value in (
        ({"type": "string", "pattern": slow}, "a" * 50 + "b"),
        ({"patternProperties": {slow: {}}, "additionalProperties": False}, {"a" * 50 + "b": 1}),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, 1),
        ({"type": "no such type"}, 1),
    ):
        assert find_mismatch(value, schema) is None


def test_a_tool_that_sets_an_alarm_fails_with_what_to_use_instead_and_is_called_once():
    called = []

    @function_tool
    def guarded(item: str) -> str:
        """Look up, at most for a second."""
        called.append(item)
        signal.signal(signal.SIGALRM, lambda *_: None)
        return f"{item} found"

    [result] = asyncio.run(run_calls({"guarded": guarded}, [ToolCall("a", "guarded", {"item": "lamp"})], 5.0))
    assert (result.ok, result.raised, called) == (False, True, ["lamp"])
    assert "work in the main thread alone" in result.content
    assert "rollout.tool_timeout_s" in result.content
