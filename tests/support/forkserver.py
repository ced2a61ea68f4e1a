"""Python processes that start with their imports done: forked from one process in which they were done once.

`Forkserver(["torch", …]).popen("-m", "palestra", …)` is `subprocess.Popen([sys.executable, "-m", "palestra", …], …)`
without the seconds that each would take to import torch and transformers: a process with a pid, environment, folder and
pipes of its own, which can be killed and waited for. Only what those modules read from the environment while they are
imported is as it was in the server's.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

REQUEST_BYTES = 100_000  # arguments and environment


class Forkserver:
    def __init__(self, modules: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.folder = tempfile.mkdtemp(prefix="palestra-fork-")  # not one that goes when a fork of this process ends
        self.address = f"{self.folder}/socket"
        command = [sys.executable, __file__, self.address, *modules]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listens\n"  # requests wait until everything is imported

    def popen(self, *arguments: str, **options: Any) -> Forked:
        """What comes behind `python` on its command line: -c CODE, -m MODULE or a file, and their arguments."""
        return Forked(self.address, arguments, **options)

    def run(self, *arguments: str, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run`, with all that was printed as text."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(*arguments, text=True, **pipes | options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()
        shutil.rmtree(self.folder)


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process that the server starts, and waits for, in our place."""

    def __init__(self, address: str, arguments: Sequence[str], **options: Any) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        super().__init__(arguments, **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ) -> None:  # fmt: skip
        files = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = [args, os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env)]
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        self.pid = int(self._connection.recv(20))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(20))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._connection.close()
        return self.returncode


def serve(address: str, modules: Sequence[str]) -> None:
    """Fork a process for every request, until the input ends, with all who could ask. Returns in those processes alone,
    at their end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(16)
    print("listens", flush=True)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what is imported stays, and stays shared among the forks
    atexit.register(gc.unfreeze)  # extension modules complain of what is left at the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
        connection, _ = ready[0].accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            message, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
            if child := os.fork():
                connection.send(str(child).encode())
                for file in files:
                    os.close(file)
                _, status = os.waitpid(child, 0)
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                os._exit(0)
            connection.close()
            listener.close()
            become(*json.loads(message), files)
            return
        connection.close()
    os._exit(0)


def become(arguments: list[str], folder: str, env: dict[str, str], files: list[int]) -> None:
    """Go on as `python ARGUMENTS` in FOLDER."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "torch" in sys.modules and (threads := env.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    kind, *rest = arguments
    if kind == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
