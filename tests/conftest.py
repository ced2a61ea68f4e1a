"""Shared by all tests: offline, deterministic, and the embedded model at hand."""

import asyncio
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forkserver import Forkserver

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HOME = tempfile.TemporaryDirectory(prefix="palestra-home-", ignore_cleanup_errors=True)
os.environ["PALESTRA_HOME"] = HOME.name  # trainings are listed; those of tests not among the user's

# Each takes a good part of a minute. They go first, half of them to each of two workers, so that none is left over
# for the end, when the other worker has nothing more to do.
LONG = (
    "faults/",
    "parity/test_engine_cuda_path",
    "contract/test_two_processes",
    "learn/",
    "faces/test_rl_",
    "faces/test_env_serve",
)


def pytest_collection_modifyitems(items):
    if not os.environ.get("PALESTRA_TEST_SLOW"):
        for item in items:
            if mark := item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason=mark.args[0] if mark.args else "make test-slow runs it"))
    long = [item for item in items if any(name in item.nodeid for name in LONG)]
    others = [item for item in items if item not in set(long)]
    files = list(dict.fromkeys(item.path for item in long))  # whole files: their fixtures are made once
    first, second = ([item for item in long if item.path in set(files[start::2])] for start in (0, 1))
    half = (len(items) + 1) // 2 - len(first)
    items[:] = [*first, *others[:half], *second, *others[half:]]


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from palestra.models.loading import load_model

    return load_model("palestra/tiny").tokenizer


@pytest.fixture
def tiny():
    """A fresh copy of the embedded model with its tokenizer."""
    from palestra.models.loading import load_model

    return load_model("palestra/tiny")


@pytest.fixture(scope="session")
def forkserver():
    """Starts Python processes in which torch, transformers and most of Palestra are imported already."""
    server = Forkserver(["transformers.models.auto.modeling_auto", "palestra.api", "palestra.serve.loading"])
    yield server
    server.close()


@pytest.fixture(scope="module")
def serve():
    """Call it with an application to get its URL on a free loopback port; it ends with the module."""
    from palestra.serve.web import Server, open_port, url_of

    running = []

    def start(app, **options):
        server, sock = Server(app, **options), open_port("127.0.0.1", 0, None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return url_of(sock)

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)
        assert not thread.is_alive()
