"""Start a Python program many times and import its modules once (`agent.fork_server`).

`python fork_server.py serve SOCKET SCRIPT ARGUMENTS` imports what the script imports, and later what its first run has
imported besides. It forks a process for each `python fork_server.py run SOCKET`, which lends it its streams,
environment and working directory, and ends with its exit status. Whichever of the two ends first, the other ends as
well. Needs nothing of Palestra: the interpreter is the agent's.
"""

import array
import ast
import atexit
import contextlib
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_MAX_REQUEST = 1 << 20
_MAX_SCANS = 20
_POLL_S = 0.02  # where there are no pidfds


def serve(path: str, script: str, arguments: list[str]) -> None:
    """Answer until stdin, a pipe of the parent's, is closed."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    load(imported_modules(script))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are nobody's to wait for
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:
            return
        connection, _ = listener.accept()
        if found := first_run(path):
            load(found)
        if os.fork() == 0:
            listener.close()
            supervise(connection, script, f"{path}.modules")
        connection.close()


def imported_modules(script: str) -> Iterator[str]:
    """The modules that a script imports at its top level; an error in it is reported when the program runs."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(Path(script).read_bytes()).body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module


def load(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # the program says so itself, in every attempt
            importlib.import_module(name)


def first_run(path: str) -> list[str]:
    """The modules of the first run that has ended; the file is there once."""
    with contextlib.suppress(OSError, ValueError):
        names: list[str] = json.loads(Path(f"{path}.modules").read_text())
        Path(f"{path}.modules").unlink()
        Path(f"{path}.learned").touch()
        return names
    return []


def supervise(connection: socket.socket, script: str, modules: str) -> NoReturn:
    """In a child of the server: start the program, and end it when the client is gone. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # the server's group is killed at the end of a run, perhaps while this ends its program
        become_subreaper()
        request, streams = receive(connection)
        child = os.fork()
        if child == 0:
            connection.close()
            run_program(request, streams, script, modules)
        for stream in streams:
            os.close(stream)
        null = os.open(os.devnull, os.O_RDWR)
        for own in (0, 1, 2):  # else the parent's pipe would stay open as long as this process
            os.dup2(null, own)
        status = wait(child, connection)
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(status).encode())
        code = 0
    finally:
        os._exit(code)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request, and the three streams that come along."""
    size = array.array("i").itemsize * 3
    data, ancillary, _, _ = connection.recvmsg(_MAX_REQUEST, socket.CMSG_LEN(size))
    streams = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            streams.frombytes(content[: len(content) - len(content) % streams.itemsize])
    length, _, data = data.partition(b"\n")
    while len(data) < int(length):
        more = connection.recv(_MAX_REQUEST)
        if not more:
            raise EOFError
        data += more
    return json.loads(data), list(streams)


def wait(child: int, connection: socket.socket) -> int:
    """The child's status as waitpid gives it; killed with all that it has started when the connection is closed."""
    try:
        watched = os.pidfd_open(child)
    except (AttributeError, OSError):
        watched = None
    while True:
        watching = [connection.fileno(), *([] if watched is None else [watched])]
        ready, _, _ = select.select(watching, [], [], _POLL_S if watched is None else None)
        if connection.fileno() in ready:
            end(child)
            return os.waitpid(child, 0)[1]
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            end(child)
            return status


def end(leader: int) -> None:
    """Kill the program's process group, then the descendants of this subreaper that have left the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for _ in range(_MAX_SCANS):  # a process may start another one before it is killed
        left = [pid for pid in descendants(os.getpid()) if pid != leader]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # not ours until its parent has ended
                os.waitpid(pid, os.WNOHANG)
        if not left:
            return


def descendants(ancestor: int) -> list[int]:
    """The processes that a process and its descendants have started, zombies left out. Linux only."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found, new = [], [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found


def become_subreaper() -> None:
    """Let orphans of this process's descendants become its children (PR_SET_CHILD_SUBREAPER), so that it finds them."""
    with contextlib.suppress(Exception):  # no Linux, or an interpreter without ctypes
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def run_program(request: dict[str, Any], streams: list[int], script: str, modules: str) -> NoReturn:
    """In the forked process: the program, as if it had just been started. Never returns."""
    code, known = 1, set(sys.modules)
    try:
        os.setpgid(0, 0)
        for own, stream in enumerate(streams):
            os.dup2(stream, own)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        random.seed()  # else all would draw the same numbers
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
            atexit._run_exitfuncs()
        for written in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                written.flush()
        with contextlib.suppress(Exception):
            record_modules(modules, [name for name in sys.modules if name not in known])
        os._exit(code & 0xFF)


def record_modules(path: str, names: list[str]) -> None:
    """Leave the names of modules for the server, unless an earlier run has done so."""
    if not Path(path).exists() and not Path(path.replace(".modules", ".learned")).exists():
        own = Path(f"{path}.{os.getpid()}")
        own.write_text(json.dumps(names))
        own.rename(path)


def run(path: str) -> NoReturn:
    """Ask for one run of the program, and end as it does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps({"env": dict(os.environ), "cwd": os.getcwd()}).encode()
    streams = array.array("i", [0, 1, 2])
    header = b"%d\n" % len(request)
    connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(request)
    for own in (0, 1, 2):
        os.close(own)
    answer = connection.recv(64)
    code = os.waitstatus_to_exitcode(json.loads(answer)) if answer else 1
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        run(sys.argv[2])
