"""A stub of an OpenAI-style endpoint for judges, simulated users and reflectors: a function answers each request."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.support.served import json_app, served

Answer = str | int | Response  # a text, a status, or a whole response


class StubModel:
    """What it was asked, and how many requests were in flight at most."""

    def __init__(self, answer: Callable[[str], Answer], delay_s: float = 0.0) -> None:
        self.answer, self.delay_s = answer, delay_s
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []  # the Authorization header of each request
        self.in_flight = self.most_in_flight = 0
        self.base_url = ""

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    async def respond(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.keys.append(request.headers.get("authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            answer = self.answer(body["messages"][-1]["content"])
        finally:
            self.in_flight -= 1
        if isinstance(answer, int):
            return JSONResponse({"error": {"message": "stub"}}, answer)
        if isinstance(answer, Response):
            return answer
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return {"choices": [{"message": {"role": "assistant", "content": answer}}], "usage": usage}


@contextmanager
def stub_model(answer: Callable[[str], Answer], delay_s: float = 0.0) -> Iterator[StubModel]:
    stub = StubModel(answer, delay_s)
    with served(json_app(stub.respond)) as url:
        stub.base_url = f"{url}/v1"
        yield stub


def attempts_of(question: str) -> list[str]:
    """The attempts that a ruler shows, in its order."""
    return [part.partition("\n")[2].strip() for part in re.split(r"^# Attempt ", question, flags=re.MULTILINE)[1:]]


def ranks(values: list[float]) -> str:
    """A ruler's answer."""
    return json.dumps({"attempts": {str(i): {"score": v, "reason": f"{v:g}"} for i, v in enumerate(values, start=1)}})
