"""Shared by all tests: offline, deterministic, and the embedded model at hand."""

import copy
import gc
import os
import re
import signal
import ssl
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

import missing_extras
from forkserver import Forkserver
from workers import run_in_workers

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
gc.disable()  # while a few thousand modules are imported, of which nothing is garbage
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every client of httpx and of the SDKs reads the system's certificates, for 50 ms of CPU. Tests talk to loopback.
ssl.create_default_context = cache(ssl.create_default_context)

# Files that take a good part of a minute. They go first, so that none is left over for the end, when the other workers
# have nothing more to do.
LONG = (
    "faults/",
    "parity/test_engine_cuda_path",
    "parity/test_model_support",
    "parity/test_recurrent_steps",
    "extras/ranks/",
    "parity/test_two_processes",
    "parity/test_gguf_llama_cpp",
    "parity/test_step_one",
    "learn/",
    "interfaces/test_rl_",
    "interfaces/test_env_serve",
    "interfaces/test_tinker_cookbook",
)
IMPORTED = ["transformers.models.auto.modeling_auto", "palestra.api", "palestra.servers.openai.inference"]
if find_spec("triton"):
    IMPORTED += ["palestra.engine.cuda.runner", "palestra.learner.kernels", "fast_interpreter"]
SHARED = pytest.StashKey[Forkserver]()


EXTRAS = Path(__file__).parents[1] / "src" / "palestra" / "extras"
if not EXTRAS.is_dir():
    missing_extras.install()
DELETED = "it needs an extra that was deleted"
SAID_WITHOUT_EXTRAS = re.compile(
    r"whose folder palestra/extras/|pip install --force-reinstall 'palestra\["  # pytest shortens long messages
    r"|No module named 'palestra\.extras|'RunConfig' object has no attribute '(distill|vllm|tinker|ray)'"
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _skipped_without_extras((yield), collector)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _skipped_without_extras((yield), item)


def _skipped_without_extras(report, node):
    """What fails for want of an extra whose folder was deleted is skipped, also if a command that it ran says so."""
    if EXTRAS.is_dir() or not report.failed:
        return report
    said = "\n".join([str(report.longrepr), *(text for _, text in report.sections)])
    if SAID_WITHOUT_EXTRAS.search(said):
        report.outcome, report.longrepr = "skipped", (str(node.path), 0, DELETED)
    return report


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=1, help="processes that run tests, one file's each at a time")


def pytest_collection_modifyitems(items):
    if not os.environ.get("PALESTRA_TEST_SLOW"):
        for item in items:
            if mark := item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason=mark.args[0] if mark.args else "make test-slow runs it"))
    if not EXTRAS.is_dir():
        for item in items:
            if item.get_closest_marker("extras"):
                item.add_marker(pytest.mark.skip(reason=DELETED))
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


def pytest_collection_finish():
    gc.enable()
    gc.freeze()  # what is imported stays: no need to look through it again and again


def pytest_unconfigure():
    gc.unfreeze()  # extension modules complain of what is left at the end


def pytest_runtestloop(session):
    workers = session.config.getoption("workers")
    if workers < 2 or not any("forkserver" in item.fixturenames for item in session.items):
        return run_in_workers(session, workers)
    session.config.stash[SHARED] = server = start_forkserver()
    try:
        return run_in_workers(session, workers)
    finally:
        del session.config.stash[SHARED]
        server.close()


def start_forkserver():
    """On a machine without a GPU, its processes run kernels in Triton's interpreter, if they ask for that, too: it has
    to be asked for before Triton is imported."""
    import torch

    return Forkserver(IMPORTED, os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}))


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory):
    """Trainings are listed there; those of tests not among the user's."""
    os.environ["PALESTRA_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def _loaded_tiny():
    from palestra.models.loading import load_model

    return load_model("palestra/tiny")


@pytest.fixture(scope="session")
def gateway_workers():
    """Two gateway workers, for one gateway at a time."""
    from reused_workers import ReusedWorkers

    workers = ReusedWorkers(2, "127.0.0.1")
    yield workers
    workers.end()


@pytest.fixture
def tiny_tokenizer(_loaded_tiny):
    """A copy for each test, which may change it."""
    return copy.deepcopy(_loaded_tiny.tokenizer)


@pytest.fixture
def tiny(_loaded_tiny):
    """A fresh copy of the embedded model with its tokenizer."""
    return replace(
        _loaded_tiny, model=copy.deepcopy(_loaded_tiny.model), tokenizer=copy.deepcopy(_loaded_tiny.tokenizer)
    )


@pytest.fixture(scope="session")
def forkserver(request):
    """Starts Python processes in which torch, transformers and Palestra are imported already; workers share it."""
    if shared := request.config.stash.get(SHARED, None):
        yield shared
        return
    server = start_forkserver()
    yield server
    server.close()


@pytest.fixture(scope="module")
def serve():
    """Call it with an application to get its URL on a free loopback port; it ends with the module."""
    from served import served

    with ExitStack() as running:
        yield lambda app, **options: running.enter_context(served(app, **options))
