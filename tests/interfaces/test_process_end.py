"""The `palestra` process ends at once, with its status, its output and what others do at exit."""

import subprocess
import sys

import pytest

PRELUDE = """
import atexit, concurrent.futures, os, sys, time
import palestra.cli.main as cli

class Module:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")

module = Module()

def run(arguments):
    atexit.register(lambda: print("exit handler"))
    concurrent.futures.ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print("thread")))
    print("command")
    {ending}

cli.run = run
{trace}
cli.main()
"""


def ended(ending: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    code = PRELUDE.format(ending=ending, trace=trace)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_ctrl_c_during_the_exit_ends_it_without_a_traceback() -> None:
    interrupt = "atexit.register(os.kill, os.getpid(), 2)"
    process = ended(f"{interrupt}; return 130")
    assert (process.returncode, process.stderr) == (130, "")


@pytest.mark.parametrize("status", [0, 2])
def test_threads_and_exit_handlers_run_and_nothing_is_taken_apart(status: int) -> None:
    process = ended(f"return {status}")
    assert (process.returncode, process.stderr) == (status, "")
    assert process.stdout.splitlines() == ["command", "thread", "exit handler"]


def test_an_unexpected_error_shows_its_traceback() -> None:
    process = ended("raise RuntimeError('unexpected')")
    assert process.returncode == 1
    assert "RuntimeError: unexpected" in process.stderr
    assert process.stdout.splitlines()[-1] == "taken apart"


def test_a_coverage_tool_gets_the_usual_end() -> None:
    process = ended("return 3", trace="sys.settrace(lambda *_: None)")
    assert process.returncode == 3
    assert process.stdout.splitlines()[-1] == "taken apart"


@pytest.mark.parametrize(("status", "expected"), [(0, 70), (5, 5)])
def test_code_that_leaves_the_process_is_reported_and_is_no_success(status: int, expected: int) -> None:
    process = ended(f"os._exit({status})")
    assert process.returncode == expected
    assert process.stderr.count("\n") == 1
    assert f"os._exit({status})" in process.stderr


def test_a_forked_child_may_leave_with_0() -> None:
    process = ended("child = os.fork() or os._exit(0); return os.waitpid(child, 0)[1]")
    assert (process.returncode, process.stderr) == (0, "")


def test_a_crash_names_the_code_that_crashed() -> None:
    process = ended("import ctypes; ctypes.string_at(0)")
    assert process.returncode < 0
    assert "Segmentation fault" in process.stderr
    assert "in run" in process.stderr
