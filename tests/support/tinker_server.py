"""Our own Tinker server in a thread, for those that are its clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from served import served

from palestra.extras.tinker.server.base_model import BaseModel
from palestra.extras.tinker.server.server import tinker_app
from palestra.extras.tinker.server.service import Service, ServiceLimits
from palestra.models.loading import LoadedModel, load_model


@dataclass
class Running:
    url: str
    service: Service


def base_model(model: Any, tokenizer: Any, name: str) -> BaseModel:
    return BaseModel(LoadedModel(model, tokenizer, name, ""))


def first_layer() -> BaseModel:
    """The embedded model's first layer, where what is tested does not depend on their number."""
    loaded = load_model("palestra/tiny", device="cpu")
    del loaded.model.model.layers[1:]
    loaded.model.config.num_hidden_layers = 1
    loaded.model.config.layer_types = loaded.model.config.layer_types[:1]
    return BaseModel(loaded)


def made(client: Any) -> Any:
    """The client of a method of the SDK that makes one; 0.38 and newer give a future of it."""
    return client.result() if hasattr(client, "result") else client


@contextmanager
def serving(service: Service, token: str | None = None, long_poll_s: float = 30.0) -> Iterator[Running]:
    with served(tinker_app(service, token=token, long_poll_s=long_poll_s), token) as url:
        yield Running(url, service)


@contextmanager
def tinker_server(bases: list[BaseModel], folder: Path) -> Iterator[Running]:
    """The SDK finds a key in the environment meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("PALESTRA_HOME", str(folder / "home"))
        with serving(Service(bases, folder / "runs", ServiceLimits(models=64))) as running:
            yield running
