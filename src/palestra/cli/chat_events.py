"""A chat for programs: questions come as lines of JSON on stdin, everything that happens goes out as lines on stdout.

    > {"say": "What do 3 red lamps cost?"}
    < {"delta": "That"}                                  what has been sampled of the current message
    < {"message": {"role": "assistant", "text": …}}      a whole one, in place of its deltas
    < {"done": {"stop": "answered"}}                     or {"error": "…"}

SIGINT ends an answer, the end of stdin the chat.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import PalestraError
from palestra.core.types import Message

if TYPE_CHECKING:
    from palestra.rollout.converse import ChatSession

_LOOK_S = 0.05


def serve_chat(session: ChatSession, runner: asyncio.Runner, ready: Mapping[str, Any]) -> None:
    """Answer questions until stdin ends."""
    _send("ready", ready)
    while line := _next_line():
        try:
            text = json.loads(line)["say"]
            stop = runner.run(_answer(session, str(text)))
            _send("done", {"stop": stop})
        except KeyboardInterrupt:
            _send("done", {"stop": "cancelled"})
        except PalestraError as error:
            _send("error", str(error))
        except (ValueError, KeyError, TypeError):
            _send("error", 'expected a line such as {"say": "…"}')


def _next_line() -> str:
    while True:
        try:
            return sys.stdin.readline()
        except KeyboardInterrupt:  # it came after the answer had ended
            continue


async def _answer(session: ChatSession, text: str) -> str:
    sent = ""

    def on_message(message: Message) -> None:
        nonlocal sent
        sent = ""
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments, "error": c.error} for c in message.tool_calls]
        _send("message", {"role": message.role, "text": message.text, "tool_calls": calls, "name": message.name})

    async def looking() -> None:
        nonlocal sent
        while True:
            await asyncio.sleep(_LOOK_S)
            now = session.so_far
            # a character of several tokens changes until it is whole
            if now.startswith(sent) and len(now) > len(sent) and not now.endswith("\ufffd"):
                _send("delta", now[len(sent) :])
                sent = now

    watcher = asyncio.create_task(looking())
    try:
        return await session.say(text, on_message)
    finally:
        watcher.cancel()


def _send(kind: str, data: Any) -> None:
    click.echo(json.dumps({kind: data}))
    sys.stdout.flush()


def described(model: str, instructions: str, tools: Sequence[Any], note: str) -> dict[str, Any]:
    return {"model": model, "instructions": instructions, "tools": [tool.name for tool in tools], "note": note}
