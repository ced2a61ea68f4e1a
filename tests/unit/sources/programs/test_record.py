"""The recorder: all passes through unchanged, traces are chat lines, and no key is written down."""

import asyncio
import json

import httpx
import pytest
from served import json_app, served
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from palestra import EvalSuite
from palestra.extras.record.recorder import Recorder

KEY = "sk-live-very-secret-0123456789"
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def sse(*events, named=False):
    lines = (f"event: {e['type']}\n" if named else "" for e in events)
    text = "".join(f"{name}data: {json.dumps(e)}\n\n" for name, e in zip(lines, events, strict=True))
    return (text + ("" if named else "data: [DONE]\n\n")).encode()


def delta(**fields):
    return {"id": "r1", "model": "m-1", "choices": [{"index": 0, "delta": fields}]}


CHAT_STREAM = sse(
    delta(role="assistant", content=""),
    delta(content="Let me "),
    delta(content="see."),
    delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    {"id": "r1", "model": "m-1", "choices": [], "usage": {"total_tokens": 9}},
)
ANTHROPIC_STREAM = sse(
    {"type": "message_start", "message": {"id": "m", "model": "claude", "content": [], "usage": {"input_tokens": 3}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Let me see."}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    },
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}},
    {"type": "message_stop"},
    named=True,
)
OUTPUT = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
]
RESPONSE = {"id": "resp_1", "model": "m-1", "output": OUTPUT, "usage": {"total_tokens": 9}}
RESPONSE_STREAM = sse({"type": "response.created"}, {"type": "response.completed", "response": RESPONSE}, named=True)


class StandIn:
    """An API that answers from a table, and remembers what it was sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []

    async def answer(self, request: Request):
        body = await request.body()
        self.seen.append((request.url.path, dict(request.headers), body))
        asked = json.loads(body) if body else {}
        if request.url.path == "/v1/models":
            return JSONResponse({"data": []}, headers={"x-request-id": "r-7"})
        if asked.get("model") == "none":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if asked.get("stream"):
            streams = {"/v1/messages": ANTHROPIC_STREAM, "/v1/responses": RESPONSE_STREAM}
            whole = streams.get(request.url.path, CHAT_STREAM)

            async def pieces():
                for i in range(0, len(whole), 7):  # in the middle of lines, too
                    yield whole[i : i + 7]

            return StreamingResponse(pieces(), media_type="text/event-stream")
        if request.url.path == "/v1/responses":
            return RESPONSE
        message = {"role": "assistant", "content": "It is 3."}
        return {"id": "x", "model": "m-1", "choices": [{"message": message}], "usage": {}}


@pytest.fixture
def recorded(tmp_path):
    """Send requests through a recorder; gives the answers, what the API saw, and the lines of the file."""

    def send(*requests):
        stand_in, file = StandIn(), tmp_path / "traces.jsonl"
        with (
            served(json_app(stand_in.answer)) as api,
            served(Recorder(file, f"{api}/v1").app()) as url,
            httpx.Client(base_url=url, timeout=30) as client,
        ):
            answers = [client.request(method, path, **more) for method, path, more in requests]
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return answers, stand_in.seen, lines, file

    return send


BEARER = {"Authorization": f"Bearer {KEY}"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}


def test_a_stream_passes_byte_for_byte_and_becomes_one_line(recorded):
    body = {"model": "m", "messages": [SYSTEM, USER], "tools": TOOLS, "stream": True}
    (answer,), seen, (line,), _ = recorded(("POST", "/v1/chat/completions?x=1", {"json": body, "headers": BEARER}))
    assert answer.content == CHAT_STREAM
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert seen[0][0] == "/v1/chat/completions"
    assert seen[0][1]["authorization"] == f"Bearer {KEY}"
    assert json.loads(seen[0][2]) == body
    reply = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    assert line["messages"] == [SYSTEM, USER, reply]
    assert line["tools"] == TOOLS
    assert line["usage"] == {"total_tokens": 9}
    assert line["model"] == "m-1"


def test_the_three_dialects_give_the_same_messages(recorded):
    anthropic = {
        "model": "claude",
        "max_tokens": 9,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "stream": True,
    }
    responses = {
        "model": "m",
        "instructions": "Be brief.",
        "input": "1 + 2?",
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    }
    answers, _, lines, _ = recorded(
        ("POST", "/v1/messages", {"json": anthropic, "headers": {"x-api-key": KEY, "anthropic-version": "2023-06-01"}}),
        ("POST", "/v1/responses", {"json": responses, "headers": BEARER}),
        ("POST", "/v1/responses", {"json": {**responses, "stream": True}, "headers": BEARER}),
    )
    assert answers[0].content == ANTHROPIC_STREAM
    assert answers[2].content == RESPONSE_STREAM
    reply = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    for line in lines:
        assert line["messages"] == [SYSTEM, USER, reply]
        assert line["tools"][0]["function"]["name"] == "add"
    assert lines[0]["usage"] == {"input_tokens": 3, "output_tokens": 5}
    assert [line["dialect"] for line in lines] == ["messages", "responses", "responses"]


def test_a_response_that_goes_on_from_another_has_its_history(recorded):
    first = {"model": "m", "input": [USER]}
    output = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    second = {"model": "m", "previous_response_id": "resp_1", "input": [output]}
    _, _, lines, _ = recorded(*(("POST", "/v1/responses", {"json": body}) for body in (first, second)))
    assert [m["role"] for m in lines[1]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert lines[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_no_key_is_written_down_not_even_one_in_a_message(recorded):
    body = {"model": "m", "messages": [{"role": "user", "content": f"my key is {KEY}"}]}
    _, _, lines, file = recorded(("POST", "/v1/chat/completions", {"json": body, "headers": BEARER}))
    assert KEY not in file.read_text()
    assert lines[0]["messages"][0]["content"] == "my key is [API key]"


def test_errors_and_other_paths_pass_and_leave_no_line(recorded):
    body = {"model": "none", "messages": [USER]}
    answers, _, lines, _ = recorded(
        ("POST", "/v1/chat/completions", {"json": body}),
        ("GET", "/v1/models", {"headers": BEARER}),
    )
    assert answers[0].status_code == 404
    assert answers[0].json() == {"error": {"message": "no such model"}}
    assert answers[1].headers["x-request-id"] == "r-7"
    assert lines == []


def test_an_api_that_cannot_be_reached_is_told_with_502(tmp_path):
    async def run():
        app = Recorder(tmp_path / "t.jsonl", "http://127.0.0.1:1").app()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.post("/v1/chat/completions", json={"model": "m", "messages": [USER]})

    answer = asyncio.run(run())
    assert answer.status_code == 502
    assert "could not be asked" in answer.json()["error"]["message"]


def test_traces_are_cases(recorded):
    body = {"model": "m", "messages": [SYSTEM, USER]}
    _, _, _, file = recorded(("POST", "/v1/chat/completions", {"json": body, "headers": BEARER}))
    suite = EvalSuite.from_jsonl(file)
    assert [message.text for message in suite.cases[0].input] == ["Be brief.", "1 + 2?"]
