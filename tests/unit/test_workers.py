"""`pytest --workers N`, which `make test` uses: nothing that happens in a worker is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from workers import run_in_workers

def pytest_addoption(parser):
    parser.addoption("--workers", type=int)

def pytest_runtestloop(session):
    return run_in_workers(session, session.config.getoption("workers"))
"""
TESTS = """
import os, warnings
import pytest

@pytest.fixture(scope="module")
def made():
    yield os.getpid()
    with open("torn_down", "a") as file:
        file.write("x")

def test_passes(made):
    assert made == os.getpid()

def test_passes_in_the_same_process(made):
    assert made == os.getpid()

def test_fails(made):
    print("its own words")
    assert ["left"] == ["right"]

def test_warns():
    warnings.warn("be careful")

def test_is_skipped():
    pytest.skip("not here")

def test_ends_its_process():
    os._exit(7)

def test_comes_after_it(made):
    pass

@pytest.mark.serial
@pytest.mark.parametrize("number", range(2))
def test_is_alone(number):
    assert open("torn_down").read() == "xxx"  # all others have ended
"""


def test_each_test_is_reported_once_also_where_a_worker_dies(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--workers", "2", "--tb=short"]
    # No short summary: where the variable CI is set, it repeats each message in full.
    command += ["-rN", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "6 failed, 18 passed, 3 skipped, 3 warnings" in done.stdout
    assert done.stdout.count("the process that ran it ended with status 7") == 3
    assert done.stdout.count("assert ['left'] == ['right']") >= 3
    assert done.stdout.count("\nits own words\n") == 3
    assert (tmp_path / "torn_down").read_text() == "xxx"  # by those that went on behind the ones that died
