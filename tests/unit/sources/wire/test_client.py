"""The client of the trajectory API."""

import asyncio

import pytest

from palestra.core import http
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.http import Reply
from palestra.core.run_folder import RunFolder
from palestra.sources.wire.protocol import NoBatch, WireClient


def test_trajectory_api_that_is_not_there_is_told_with_the_remedy():
    client = WireClient("http://127.0.0.1:9", give_up_s=0)
    with pytest.raises(PalestraError, match="palestra trajectory"):
        asyncio.run(client.batch(0))


@pytest.fixture
def replies(monkeypatch):
    """What the API answers, one after the other; the methods that it was asked by."""
    answers, methods = [], []

    async def send(request: http.Request) -> Reply:
        methods.append(request.method or "GET")
        status, body = answers.pop(0)
        return Reply(status, body, {})

    monkeypatch.setattr(http.Request, "send_async", send)
    return answers, methods


def test_a_server_that_gives_batches_by_get_alone_is_asked_so(replies):
    answers, methods = replies
    answers += [(405, b"Method Not Allowed"), (200, b'{"batch": [{"tokens": []}]}')]
    assert asyncio.run(WireClient("http://127.0.0.1:9").batch(3)) == (4, [{"tokens": []}])
    assert methods == ["POST", "GET"]


def test_an_api_that_forgot_its_trainer_ends_the_run_instead_of_an_endless_wait(replies):
    answers, _ = replies
    answers += [(200, b'{"batch": null, "status": "error", "message": "no trainer is registered"}')]
    with pytest.raises(PalestraError, match="no trainer is registered"):
        asyncio.run(WireClient("http://127.0.0.1:9").batch(3))
    answers += [(200, b'{"batch": null, "message": "groups of 4 never add up"}')]
    assert asyncio.run(WireClient("http://127.0.0.1:9").batch(3)) == NoBatch("groups of 4 never add up")


@pytest.mark.parametrize("answer", [(404, b"Not Found"), (501, b"Unsupported method"), (200, b"<html>")])
def test_a_server_that_is_no_trajectory_api_is_told_at_once(replies, answer, tmp_path):
    answers, _ = replies
    answers += [answer]
    folder = RunFolder.create(tmp_path, "clerk", RunConfig().with_step_size(), {})
    with pytest.raises(PalestraError, match="no trajectory API; `palestra trajectory` starts one"):
        asyncio.run(WireClient("http://127.0.0.1:9").register(folder.config, 0, 512, folder))
