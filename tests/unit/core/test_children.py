"""Child processes end with all that they have started, and see nothing that they need not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from palestra.core import children

# prints the number of a process that it has started, which outlives it unless it is ended too
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def start_parent(seconds: float) -> tuple[subprocess.Popen[str], int]:
    process = children.start([sys.executable, "-c", PARENT, str(seconds)])
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def wait_until_ended(pid: int) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} still runs")


def test_end_kills_what_the_child_has_started():
    process, grandchild = start_parent(60)
    children.end(process)
    assert process.returncode == -signal.SIGKILL
    wait_until_ended(grandchild)


def test_end_kills_what_a_finished_child_has_left_behind():
    process, grandchild = start_parent(0)
    assert process.wait(20) == 0
    children.end(process)
    wait_until_ended(grandchild)


def test_child_may_end_by_itself_within_the_time_after_sigterm():
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(7)); print(flush=True); time.sleep(60)"
    process = children.start([sys.executable, "-c", code])
    assert process.stdout is not None
    process.stdout.readline()
    children.end(process, terminate_s=20)
    assert process.returncode == 7


def test_child_that_ignores_sigterm_is_killed():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = children.start([sys.executable, "-c", code])
    assert process.stdout is not None
    process.stdout.readline()
    children.end(process, terminate_s=0.2)
    assert process.returncode == -signal.SIGKILL


def test_child_leads_its_own_group_and_sees_no_secret(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sesame")
    code = "import os; print(os.getpgid(0) == os.getpid(), os.environ.get('MY_API_KEY'), os.environ['PATH'])"
    process = children.start([sys.executable, "-c", code])
    output, _ = process.communicate(timeout=20)
    assert output.strip() == f"True None {os.environ['PATH']}"
