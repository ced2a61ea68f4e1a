"""The helpers of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["gateway", "serve"])
def with_server(request):
    """`with_server(model, agent)`: both servers have the same dialects."""
    import real_gateway

    return {"gateway": real_gateway.with_attempt, "serve": real_gateway.with_serve}[request.param]
