"""Runs one attempt of an agent's program, and ends everything that it has started.

    python -IS supervisor.py run COMMAND…              start a command
    python supervisor.py serve SOCKET SCRIPT ARG…      import a script's modules once, then fork for each attempt
    python -IS supervisor.py fork SOCKET               one attempt at such a server: ends as the program does

On Linux a supervisor is a subreaper: a process whose parent has ended becomes its child, whatever session,
group or environment it has chosen, so none is missed. Elsewhere the program's process group is killed.
Imports only the standard library, because the interpreter may be the agent's.
"""

from __future__ import annotations

import os
import signal
import sys
import time

if sys.argv[1:2] != ["run"]:  # a command starts in half the time without these
    import ast
    import atexit
    import contextlib
    import importlib
    import json
    import random
    import runpy
    import select
    import socket
    import threading
    from collections.abc import Iterable, Iterator
    from typing import Any, NoReturn

END_S = 5.0  # for killed processes to be gone
MAX_REQUEST = 1 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def run(command: list[str]) -> NoReturn:
    """Start a command; SIGTERM, or the end of the parent, ends it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if somebody kills the supervisor
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
    found, new = [], [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found


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


def fork(path: str) -> NoReturn:
    """Ask a server for one attempt, which gets this process's streams, environment and working directory."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps({"env": dict(os.environ), "cwd": os.getcwd()}).encode()
    socket.send_fds(connection, [b"%d\n" % len(request)], [0, 1, 2])
    connection.sendall(request)
    for stream in (0, 1, 2):
        os.close(stream)
    answer = connection.recv(64)
    end_like(json.loads(answer) if answer else 1 << 8)


def serve(path: str, script: str) -> None:
    """Fork for each request until stdin, a pipe of the parent's, is closed. Returns in the processes of attempts."""
    load(imported_modules(script))
    has_learned = False
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need not be waited for
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:
            sys.exit()
        connection, _ = listener.accept()
        if not has_learned:
            has_learned = load(modules_of_first_attempt(path))
        if os.fork() == 0:
            listener.close()
            supervise_fork(connection)
            if not has_learned:
                atexit.register(record_modules, path)
            return
        connection.close()


def load(names: Iterable[str]) -> bool:
    """Import modules; whether there were any."""
    name = ""
    for name in names:
        with contextlib.suppress(Exception):  # the program reports it in every attempt
            importlib.import_module(name)
    return bool(name)


def record_modules(path: str) -> None:
    """At the end of an attempt: the modules that it has imported, if it is the first that ends."""
    try:
        with open(f"{path}.modules", "x") as file:
            json.dump(list(sys.modules), file)
    except OSError:
        pass


def modules_of_first_attempt(path: str) -> list[str]:
    """Also those that a program imports only when it needs them; empty until an attempt has ended."""
    try:
        with open(f"{path}.modules") as file:
            return list(json.load(file))
    except (OSError, ValueError):
        return []


def imported_modules(script: str) -> Iterator[str]:
    """The modules that a script imports at its top level."""
    try:
        with open(script, "rb") as file:
            statements = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):  # reported when the program runs
        return
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def supervise_fork(connection: socket.socket) -> None:
    """Fork once more: returns in the program's process, and supervises it in this one."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # the server's group is killed at the end of a run, perhaps while this ends its program
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    request, streams = receive(connection)
    child = os.fork()
    if child == 0:
        connection.close()
        return enter_program(request, streams)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # otherwise the parent's pipe would stay open as long as this process
        os.dup2(null, stream)
    for stream in streams:
        os.close(stream)
    # the client ends first: its end closes the connection
    threading.Thread(target=kill_at_end, args=(connection, child), daemon=True).start()
    status = wait_and_end(child)
    try:
        connection.sendall(json.dumps(status).encode())
    finally:
        os._exit(0)


def kill_at_end(connection: socket.socket, child: int) -> None:
    connection.recv(1)  # nothing is sent
    kill(child)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the three streams that come with it."""
    data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
    length, _, data = data.partition(b"\n")
    while len(data) < int(length):
        more = connection.recv(MAX_REQUEST)
        if not more:
            os._exit(1)
        data += more
    return json.loads(data), list(streams)


def enter_program(request: dict[str, Any], streams: list[int]) -> None:
    """Make a forked process look as if it had just been started."""
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()  # otherwise all attempts would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main() -> None:
    mode, *words = sys.argv[1:]
    if mode == "run":
        run(words)
    elif mode == "fork":
        fork(words[0])
    else:
        path, script, *arguments = words
        sys.argv = [script, *arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        serve(path, script)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
