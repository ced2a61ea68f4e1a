"""Posts of agents find their endpoint without a route; they must find the one that a route would have found."""

import sys
from pathlib import Path

import httpx
import pytest
from starlette.routing import Match

sys.path.insert(0, str(Path(__file__).parent))

from real_gateway import open_attempt, with_gateway
from scripted_model import END, completer

from palestra.servers.gateway import app
from palestra.servers.http_errors import refuse

PATHS = [
    "/v1/chat/completions",
    "/attempt/abc/v1/chat/completions",
    "/attempt/abc/v1/responses",
    "/attempt/abc/v1/messages",
    "/attempt/abc/v1/messages/count_tokens",
    "/attempt/abc/v1/models",
    "/attempt/a/b/v1/messages",
    "/attempt//v1/messages",
    "/attempt/v1/messages",
    "/other/v1/messages",
    "/v1/v1/messages",
    "/attempt/abc/v1/chat/completions/",
    "/attempt/v1/v1/messages",
    "//v1/messages",
]


def routed(routes, scope):
    """The endpoint that the routes give a request, and its parameters."""
    for route in routes:
        match, child = route.matches(scope)
        if match is Match.FULL:
            inner = {**scope, **child}
            return routed(route.routes, inner) if getattr(route, "routes", None) else (route.endpoint, inner)
    return None, scope


@pytest.mark.parametrize("path", PATHS)
def test_a_post_finds_the_endpoint_of_its_route_or_is_left_to_the_routes(path, tiny_tokenizer):
    def find(attempt, key):
        raise refuse(401, "nobody")

    made = app.gateway_app(completer(tiny_tokenizer, []), find)
    (direct,) = [m for m in made.user_middleware if "find" in m.kwargs]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "path_params": {}}
    found = direct.kwargs["find"](scope)
    plain = {"type": "http", "method": "POST", "path": path, "root_path": "", "path_params": {}}
    expected, inner = routed(made.routes, plain)
    assert found is None or (found, scope["path_params"]) == (expected, inner["path_params"])
    assert (found is not None) == (path in PATHS[:4])


def test_what_no_endpoint_answers_is_told_in_json(tiny_tokenizer):
    async def ask(gateway):
        attempt = open_attempt(gateway)
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
            body = {"messages": [{"role": "user", "content": "Hi."}]}
            good = await client.post(f"/attempt/{attempt.id}/v1/chat/completions?beta=1", json=body)
            others = [await client.post(path, json=body) for path in ("/attempt/x/v1/messages", "/v1/nothing", "/x")]
            others.append(await client.get(f"/attempt/{attempt.id}/v1/messages"))
            return good, others

    good, others = with_gateway(completer(tiny_tokenizer, [f"One.{END}"]), ask)
    assert good.json()["choices"][0]["message"]["content"] == "One."
    assert [other.status_code for other in others] == [401, 404, 404, 405]
    assert all(other.json()["error"]["message"] for other in others)
