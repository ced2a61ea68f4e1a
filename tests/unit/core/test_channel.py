"""Calls between two processes that are answered later, cancelled, or fail with an error of the caller's own."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from palestra.core.channel import Channel


def with_channels(scenario: Callable[[Channel, dict[str, Any]], Awaitable[Any]], handlers: dict[str, Any]) -> Any:
    """What `scenario(channel, ends)` returns; the other end has these handlers, which find their channel in `ends`."""

    async def run() -> Any:
        mine, other = socket.socketpair()
        ends: dict[str, Any] = {}
        bound = {kind: handler(ends) for kind, handler in handlers.items()}
        ends["other"] = Channel(other, bound, lambda: None)
        ends["mine"] = Channel(mine, {}, lambda: None)
        try:
            async with asyncio.timeout(10):
                return await scenario(ends["mine"], ends)
        finally:
            ends["mine"].close()
            ends["other"].close()

    return asyncio.run(run())


def test_a_call_may_be_answered_later_in_another_form_than_the_outcome():
    def later(ends: dict[str, Any]) -> Any:
        async def work(number: int) -> int:
            await asyncio.sleep(0)
            return number + 1

        return lambda call, number: ends["other"].answer(call, work(number), lambda value: [value, "done"])

    async def scenario(channel: Channel, ends: dict[str, Any]) -> Any:
        return await channel.call("later", 4)[1]

    assert with_channels(scenario, {"later": later}) == [5, "done"]


@pytest.mark.parametrize("closes", [False, True])
def test_the_work_for_a_call_is_cancelled_by_its_caller_or_when_the_end_that_does_it_closes(closes):
    cancelled = []

    def endless(ends: dict[str, Any]) -> Any:
        async def work() -> None:
            ends["began"].set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        return lambda call: ends["other"].answer(call, work())

    async def scenario(channel: Channel, ends: dict[str, Any]) -> None:
        ends["began"] = asyncio.Event()
        number, reply = channel.call("endless")
        await ends["began"].wait()
        if closes:
            ends["other"].close()
            while not cancelled:
                await asyncio.sleep(0)
            return
        channel.cancel(number)
        with pytest.raises(RuntimeError, match="CancelledError"):
            await reply

    with_channels(scenario, {"endless": endless})
    assert cancelled == [True]


def test_an_error_that_comes_back_is_the_very_one_that_was_reported():
    own = ZeroDivisionError("division by zero")

    def raises(ends: dict[str, Any]) -> Any:
        async def work() -> None:
            raise own

        return lambda call: ends["other"].answer(call, work())

    async def scenario(channel: Channel, ends: dict[str, Any]) -> Any:
        with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero") as seen:
            await channel.call("raises")[1]
        other, mine = ends["other"], channel
        mine._handlers["back"] = (lambda call: mine.fail(call, seen.value)), tuple[int]
        with pytest.raises(ZeroDivisionError) as back:
            await other.call("back")[1]
        return back.value

    assert with_channels(scenario, {"raises": raises}) is own
