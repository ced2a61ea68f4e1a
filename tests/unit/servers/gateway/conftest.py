"""The embedded model behind a completer, and the helpers of this folder."""

import sys
from pathlib import Path

import pytest

from palestra.servers.openai.loading import load_completer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model():
    return load_completer("palestra/tiny")


@pytest.fixture(params=["gateway", "serve"])
def with_server(request):
    """`with_server(model, agent)`: both servers have the same dialects."""
    import real_gateway

    return {"gateway": real_gateway.with_attempt, "serve": real_gateway.with_serve}[request.param]
