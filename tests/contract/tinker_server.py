"""Our own Tinker server in a thread, for the learner and the policy that are its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from palestra.models.loading import LoadedModel
from palestra.serve.web import Server, open_port, url_of
from palestra.tinker.base_model import BaseModel
from palestra.tinker.server import tinker_app
from palestra.tinker.service import Service, ServiceLimits


def base_model(model: Any, tokenizer: Any, name: str) -> BaseModel:
    return BaseModel(LoadedModel(model, tokenizer, name, ""))


@contextmanager
def tinker_server(bases: list[BaseModel], folder: Path) -> Iterator[str]:
    """Its URL; the SDK finds a key in the environment meanwhile."""
    service = Service(bases, folder / "runs", ServiceLimits(models=64))
    server, sock = Server(tinker_app(service)), open_port("127.0.0.1", 0, None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("PALESTRA_HOME", str(folder / "home"))
        thread.start()
        yield url_of(sock)
        server.should_exit = True
        thread.join(10)
