"""The client of the trajectory API."""

from __future__ import annotations

import asyncio

import pytest

from palestra.core.errors import PalestraError
from palestra.wire.client import WireClient


def test_trajectory_api_that_is_not_there_is_told_with_the_remedy():
    client = WireClient("http://127.0.0.1:9", give_up_s=0)
    with pytest.raises(PalestraError, match="palestra trajectory"):
        asyncio.run(client.batch(0))
