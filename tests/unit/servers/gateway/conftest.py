"""The helpers of this folder."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["gateway", "workers", "serve"])
def with_server(request):
    """`with_server(model, agent)`: all servers have the same dialects."""
    import real_gateway

    if request.param == "workers":
        return partial(real_gateway.with_attempt, workers=request.getfixturevalue("gateway_workers"))
    return {"gateway": real_gateway.with_attempt, "serve": real_gateway.with_serve}[request.param]


@pytest.fixture(params=["gateway", "workers"])
def with_any_gateway(request):
    """`with_any_gateway(model, agent)`: a gateway without and with worker processes."""
    import real_gateway

    if request.param == "workers":
        return partial(real_gateway.with_gateway, workers=request.getfixturevalue("gateway_workers"))
    return real_gateway.with_gateway
