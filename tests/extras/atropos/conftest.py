"""Tests that are coroutines run in an event loop of their own; the embedded model behind a completer."""

import asyncio
import inspect

import pytest

from palestra.servers.openai.inference import load_completer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def model():
    return load_completer("palestra/tiny")
