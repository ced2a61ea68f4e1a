"""Malformed requests and unknown paths: every error has the form of its dialect."""

import httpx
from real_gateway import open_attempt, with_gateway
from scripted_model import QUESTION, TOOL

ADD = {"name": "add", "description": "Add.", "input_schema": TOOL["function"]["parameters"]}
FIELDS = {"model": "any", "max_tokens": 100}
MESSAGES = {**FIELDS, "messages": [QUESTION]}
CHAT = {"model": "any", "messages": [QUESTION]}
RESPONSE = {"model": "any", "input": "hi"}
NO_SCHEMA = {"type": "json_schema", "json_schema": "x"}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}

MALFORMED = [
    ("chat/completions", {"model": "any"}, "messages"),
    ("chat/completions", {**CHAT, "messages": []}, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "king", "content": "x"}]}, "king"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
    ("chat/completions", {**CHAT, "temprature": 1}, "Did you mean 'temperature'"),
    ("chat/completions", {**CHAT, "temperature": -1}, "temperature"),
    ("chat/completions", {**CHAT, "logit_bias": {"1": 2}}, "logit_bias"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "no tools"),
    ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": 3}}, "form"),
    ("chat/completions", {**CHAT, "response_format": NO_SCHEMA}, "form"),
    ("chat/completions", {**CHAT, "response_format": BAD_SCHEMA}, "schema"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x " * 9000}]}, "context"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "name"),
    ("responses", {"model": "any"}, "input"),
    ("responses", {**RESPONSE, "input": [{"type": "computer_call"}]}, "computer_call"),
    ("responses", {**RESPONSE, "input": []}, "empty"),
    ("responses", {**RESPONSE, "background": True}, "background"),
    ("responses", {**RESPONSE, "include": ["file_search_call.results"]}, "include"),
    ("messages", {"model": "any", "messages": [QUESTION]}, "max_tokens"),
    ("messages", {**FIELDS, "messages": []}, "messages"),
    ("messages", {**FIELDS, "messages": [{"role": "tool", "content": "x"}]}, "tool"),
    ("messages", {**FIELDS, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ("messages", {**FIELDS, "messages": [{"role": "user", "content": 3}]}, "content"),
    ("messages", {**FIELDS, "messages": [QUESTION, {"role": "assistant", "content": "It"}]}, "prefilled"),
    ("messages", {**MESSAGES, "temprature": 1}, "Did you mean 'temperature'"),
    (
        "messages",
        {**FIELDS, "messages": [QUESTION], "tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
        "sub",
    ),
    (
        "messages",
        {**FIELDS, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, QUESTION]},
        "tool_use",
    ),
]
RUBBISH = (b"", b"{", b"[]", b"null", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff")


def test_a_malformed_request_is_refused_in_the_form_of_its_dialect(model):
    async def ask(gateway):
        attempt = open_attempt(gateway)
        async with httpx.AsyncClient(base_url=f"{gateway.url}/attempt/{attempt.id}/v1", trust_env=False) as client:
            for path, body, says in MALFORMED:
                for stream in ({}, {"stream": True}):
                    answer = await client.post(f"/{path}", json={**body, **stream})
                    error = answer.json()
                    assert answer.status_code == 400, (path, body, error)
                    assert error["error"]["type"] == "invalid_request_error"
                    assert says in error["error"]["message"], (path, body, error)
                    assert error.get("type") == ("error" if path == "messages" else None)
            for content in RUBBISH:
                assert (await client.post("/chat/completions", content=content)).status_code == 400, content
            assert (await client.post("/chat/completions?beta=1", json={**CHAT, "max_tokens": 2})).status_code == 200
            for method, path, status in (
                ("POST", f"{gateway.url}/attempt/x/v1/messages", 401),
                ("POST", f"{gateway.url}/v1/nothing", 404),
                ("POST", f"{gateway.url}/attempt//v1/messages", 404),
                ("POST", f"{gateway.url}/attempt/a/b/v1/messages", 404),
                ("POST", "/nothing", 404),
                ("GET", "/messages", 405),
                ("GET", "/chat/completions", 405),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status, path
                assert answer.json()["error"]["message"]

    with_gateway(model, ask)
