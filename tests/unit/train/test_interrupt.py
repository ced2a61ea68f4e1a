"""SIGTERM is never lost: while sampling, in the middle of a step, and where SIGINT is ignored."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from palestra.train.watcher import deferred_interrupts, sigterm_as_ctrl_c


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background job"])
def sigint(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def send_soon() -> None:
    threading.Timer(0.02, signal.raise_signal, [signal.SIGTERM]).start()


def test_sighup_is_another_sigterm_unless_it_is_ignored_as_by_nohup(sigint: Any) -> None:
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_as_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_ends_the_wait_for_a_batch(sigint: Any) -> None:
    async def wait_for_ever() -> None:
        send_soon()
        while True:
            await asyncio.sleep(0.2)

    with asyncio.Runner() as runner, pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        runner.run(wait_for_ever())


def test_sigterm_waits_for_the_end_of_a_step(sigint: Any) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():  # noqa: PT012
        with deferred_interrupts():
            signal.raise_signal(signal.SIGTERM)
            done = True
        raise AssertionError("it was lost")
    assert done
    assert signal.getsignal(signal.SIGINT) is sigint
