"""A server on the embedded model, and the official SDK as its client."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_server import Running, first_layer, serving

from palestra.extras.tinker.server.base_model import BaseModel
from palestra.extras.tinker.server.messages import Datum, Tensor
from palestra.extras.tinker.server.service import Service, ServiceLimits

sys.path.append(str(Path(__file__).parents[4] / "scripts"))


@pytest.fixture(scope="session")
def base() -> BaseModel:
    return first_layer()


@pytest.fixture(scope="session")
def running(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tinker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_HOME", str(folder / "home"))
        with serving(Service([base], folder / "runs", ServiceLimits(models=16))) as server:
            yield server


@pytest.fixture
def service(base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    made = Service([base], tmp_path / "runs")
    yield made
    made.close()


@pytest.fixture
def sdk(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A ServiceClient of the official SDK."""
    tinker = pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = tinker.ServiceClient(base_url=running.url, api_key="tml-test")
    yield client
    client.close("success").result()


@pytest.fixture
def make_row() -> Callable[..., Datum]:
    return _row


@pytest.fixture
def serve(base, tmp_path, monkeypatch) -> Callable[..., AbstractContextManager[Running]]:
    """For a server of the test's own, with these limits."""
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    return lambda limits=None, **options: serving(Service([base], tmp_path / "runs", limits), **options)


def _row(length: int, seed: int = 0, vocabulary: int = 1024) -> Datum:
    """A row for the losses of sampled tokens, about half of it trained."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocabulary, length + 1)
    advantages = random.normal(size=length).astype(np.float32) * (np.arange(length) >= length // 2)
    logprobs = -random.random(length).astype(np.float32) * 8
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages.astype(np.float32)}
    return Datum(tokens[:-1].astype(np.int32), {name: Tensor(v, (length,)) for name, v in inputs.items()})
