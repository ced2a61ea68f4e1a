"""`python -IS supervisor.py COMMAND…`: run one attempt of an agent's program, and end everything that it has started.

On Linux a supervisor is a subreaper: a process whose parent has ended becomes its child, whatever session,
group or environment it has chosen, so none is missed. Elsewhere the program's process group is killed.
Imports only a few modules of the standard library: each attempt starts one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

END_S = 5.0  # for killed processes to be gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def run(command: list[str]) -> NoReturn:
    """Start a command; SIGTERM, or the end of the parent, ends it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the supervisor is killed
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and a program inherits that
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    signal.signal(signal.SIGTERM, lambda *_: kill(child))
    end_like(wait_and_end(child))


def wait_and_end(child: int) -> int:
    """The child's wait status, once all of this process's descendants have ended, too."""
    status = os.waitpid(child, 0)[1]
    kill(-child)  # its group, where it has not been left
    give_up = time.monotonic() + END_S
    while time.monotonic() < give_up:  # a process may start another one before it is killed
        remaining = descendants(os.getpid())
        for pid in remaining:
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not remaining:
            break
        time.sleep(0.001)
    return status


def descendants(ancestor: int) -> list[int]:
    """The processes below `ancestor` without zombies; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/stat", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (OSError, IndexError, ValueError):  # no process, or one that has just ended
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(name))
    below, new = [], [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        below += new
    return below


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # it has ended, or has become another user


def end_like(status: int) -> NoReturn:
    """Exit with a program's code, or by the signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def prctl(option: int, value: int) -> None:
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except Exception:  # not Linux, or an interpreter without ctypes
        pass


if __name__ == "__main__":
    run(sys.argv[1:])
