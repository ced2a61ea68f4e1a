"""Processes are known by number and birth, and nothing that a run started stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from builders import wait_until

from palestra.runs.processes import (
    RUN_VARIABLE,
    Process,
    descendants,
    end_all,
    identify,
    processes_of_run,
    send,
    this_process,
)

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str, **more: str) -> Process:
        words = [sys.executable, "-c", code]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, **more})
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        found = identify(process.pid)
        assert found is not None
        return found

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_is_alive_until_it_ends_even_as_a_zombie():
    assert this_process().is_alive
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    process = identify(child.pid) or Process(child.pid, "too late")
    wait_until(lambda: not process.is_alive)  # nobody has fetched its exit status
    assert child.wait() == 0


def test_a_number_that_another_process_has_got_is_not_signalled(start):
    process = start(STUBBORN)
    send(Process(process.pid, "another birth"), signal.SIGKILL)
    end_all([Process(process.pid, "another birth")], 0.1)
    assert process.is_alive


def test_who_does_not_heed_the_request_is_made_to_end_with_its_whole_group(start):
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); {STUBBORN}"
    process = start(code)
    wait_until(lambda: len(descendants(process.pid)) == 1)
    (child,) = descendants(process.pid)
    end_all([process], 0.2)
    assert not process.is_alive
    wait_until(lambda: not child.is_alive)


def test_what_a_run_started_is_found_in_other_sessions_and_without_its_parent(start):
    inner = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"
    parent = start(f"{inner}; print(flush=True); import time; time.sleep(60)", **{RUN_VARIABLE: "run-of-test"})
    wait_until(lambda: len(processes_of_run("run-of-test")) == 2)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: len(processes_of_run("run-of-test")) == 1)
    end_all(processes_of_run("run-of-test"), 0.1)
    wait_until(lambda: not processes_of_run("run-of-test"))
    assert not processes_of_run("another")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a child to its parent's life")
def test_a_spawned_process_is_asked_to_end_when_its_parent_dies(tmp_path):
    code = f"""
import os, sys
from pathlib import Path
from palestra.runs.processes import spawn
words = [sys.executable, "-c", "import time; time.sleep(60)"]
child = spawn(words, Path({str(tmp_path / "log")!r}), os.environ, Path("/")).process
print(child.pid, child.born, flush=True)
os.kill(os.getpid(), 9)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    wait_until(lambda: not Process(int(said[0]), said[1]).is_alive)
