"""Child processes end with all that they have started, and see nothing that they need not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from processes import has_ended

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


@pytest.mark.parametrize("seconds", [60, 0], ids=["running", "finished"])
def test_end_kills_what_a_running_or_finished_child_has_started(seconds):
    process, grandchild = start_parent(seconds)
    if not seconds:
        assert process.wait(20) == 0
    children.end(process)
    assert process.returncode == (-signal.SIGKILL if seconds else 0)
    assert has_ended(grandchild)


@pytest.mark.parametrize(
    ("handler", "terminate_s", "code"), [("lambda *_: exit(7)", 20, 7), ("signal.SIG_IGN", 0.2, -signal.SIGKILL)]
)
def test_a_child_may_end_by_itself_after_sigterm_and_is_killed_if_it_does_not(handler, terminate_s, code):
    program = f"import signal, time; signal.signal(signal.SIGTERM, {handler}); print(1, flush=True); time.sleep(60)"
    process = children.start([sys.executable, "-c", program])
    assert process.stdout is not None
    process.stdout.readline()
    children.end(process, terminate_s=terminate_s)
    assert process.returncode == code


def test_child_leads_its_own_group_and_sees_no_secret(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sesame")
    code = "import os; print(os.getpgid(0) == os.getpid(), os.environ.get('MY_API_KEY'), os.environ['PATH'])"
    process = children.start([sys.executable, "-c", code])
    output, _ = process.communicate(timeout=20)
    assert output.strip() == f"True None {os.environ['PATH']}"
