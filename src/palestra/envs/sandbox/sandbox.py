"""The sandbox for code that a model wrote: no network, no access to our files, and limits on all resources.

>>> with Sandbox() as sandbox:                                  # doctest: +SKIP
...     sandbox.write("hello.py", "print('hello')")
...     sandbox.run([sandbox.python, "hello.py"]).output
'hello\\n'
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from palestra.core.errors import NotAllowedError, PalestraError, ServiceError, UnsupportedError
from palestra.envs.sandbox.inside import remove_tree
from palestra.envs.sandbox.isolation import (
    ENVIRONMENT,
    PYTHON,
    Cgroup,
    Isolation,
    SandboxLimits,
    make_cgroup,
    seccomp_filter,
    visible,
)

Stopped = Literal["time", "output", "memory", "processes", "disk", "lost"]

_START_S = 30.0  # the first process inside answers by then
_GRACE_S = 5.0  # for what comes after a command's own time: ending its processes, sending its output
_INSIDE = Path(__file__).with_name("inside.py")
_NAMESPACES = Path(__file__).with_name("namespaces.py")
_BOOT = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"  # reads inside.py from stdin
log = logging.getLogger("palestra")


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. `output` is stdout and stderr together, cut at the limit; `stopped` says which limit
    ended it, if one did, or that the sandbox was lost."""

    output: str
    exit_code: int
    seconds: float
    stopped: Stopped | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.stopped is None


class Sandbox:
    """Files, and commands that can reach nothing else. One for each attempt; it starts with the first command."""

    python = PYTHON  # the interpreter inside

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        isolation: Isolation | None = None,
        *,
        allow_unsandboxed: bool = False,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.isolation = isolation or choose_isolation(allow_unsandboxed)
        self._files: dict[str, str] = {}  # to be written before the next command
        self._first: _FirstProcess | None = None
        self._lost = False

    def write(self, name: str, text: str) -> None:
        """Put a file into the sandbox's folder, in the place of whatever has that name."""
        self._files[_checked(name)] = text

    def read(self, name: str) -> str | None:
        """A file of the sandbox's folder, as far as output is kept; None when there is no such regular file."""
        if _checked(name) in self._files:
            return self._files[name][: self.limits.output_bytes]
        if self._first is None:
            return None
        text: str | None = (self._ask({"read": name}, _GRACE_S) or {}).get("text")
        return text

    def run(self, command: Sequence[str], stdin: str = "") -> CommandResult:
        """Run a command in the sandbox's folder to its end, or to the first limit that it meets."""
        began = time.monotonic()
        request = {"command": list(command), "stdin": stdin, "files": self._files}
        answer = self._ask(request, self.limits.seconds + _GRACE_S)
        self._files = {}
        if answer is None:
            return CommandResult("", -9, time.monotonic() - began, "lost")
        return CommandResult(**answer, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End the sandbox with everything in it."""
        first, self._first, self._lost = self._first, None, True
        if first is not None:
            first.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer from inside; None if the sandbox is lost, or is by now."""
        if self._lost:
            return None
        if self._first is None:
            self._first = _FirstProcess(self.limits, self.isolation)
        try:
            return self._first.ask(request, seconds)
        except (OSError, ValueError):
            self.close()
            return None


class _FirstProcess:
    """The process inside that runs the commands, and the socket that leads to it. It ends when the socket is closed."""

    def __init__(self, limits: SandboxLimits, isolation: Isolation) -> None:
        # root is exempt from the limit on processes, so commands run as a user id that no other process has
        uid = random.SystemRandom().randrange(2_000_000, 2**31) if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="palestra-sandbox-")) if isolation == "none" else None
        if self._folder and uid is not None:
            os.chown(self._folder, uid, uid)
        place, command = str(self._folder or "/work"), [PYTHON, "-ISc", _BOOT]
        if isolation == "namespaces":
            outside: dict[str, Any] = {"visible": visible(), "root": uid is not None}
            outside |= {"disk_mib": limits.disk_mib, "files": limits.files}
            command = [PYTHON, "-IS", str(_NAMESPACES), json.dumps(outside), *command]
        self._cgroup: Cgroup | None = make_cgroup(limits)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, theirs = socket.socketpair()
        self._read = self._socket.makefile("rb")
        command = [*(self._cgroup.enter() if self._cgroup else ()), *command]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE,
                    env=ENVIRONMENT | {"HOME": place, "TMPDIR": place}, cwd="/", start_new_session=True,
                )  # fmt: skip
            source, refused = _INSIDE.read_bytes(), seccomp_filter(os.uname().machine)
            if refused is None and self._folder is None:
                raise ValueError(f"there is no list of system calls for {os.uname().machine}")
            setup = {"limits": asdict(limits), "folder": place, "tmpfs": self._folder is None}
            setup |= {"uid": uid, "seccomp": (refused or b"").hex()}
            self._socket.settimeout(_START_S)
            self._socket.sendall(b"%d\n%s" % (len(source), source))
            if self.ask(setup, _START_S) != {"ready": True}:
                raise ValueError("it gave no answer")
        except (OSError, ValueError) as error:
            reason = self.close() or str(error)
            raise ServiceError(f"a sandbox ({isolation}) could not be started: {reason}") from None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(self._read.readline())
        if not isinstance(answer, dict):
            raise ValueError("no answer")
        return answer

    def close(self) -> str:
        """End it; gives the last line of what it complained about."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also wakes a thread of ours that waits for an answer
        self._read.close()
        self._socket.close()
        complaint = b""
        if process := self._process:
            try:
                _, complaint = process.communicate(timeout=2.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                _, complaint = process.communicate()
        if self._cgroup:
            self._cgroup.remove()
        if self._folder and self._folder.exists():
            with contextlib.suppress(OSError):
                remove_tree(str(self._folder))
        lines = complaint.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def _checked(name: str) -> str:
    parts = name.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\0" in name:
        raise NotAllowedError(f"{name!r} is outside of the sandbox; give a name relative to its folder")
    return name


def choose_isolation(allow_unsandboxed: bool = False) -> Isolation:
    """The isolation that works here; without one, running code is refused unless it is explicitly allowed."""
    reason = why_not()
    if reason is None:
        return "namespaces"
    if not allow_unsandboxed:
        raise UnsupportedError(
            f"code that a model writes cannot be isolated on this machine: {reason}. Permit user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0; in a container, "
            "--privileged), or set allow_unsandboxed=true to run it without a sandbox"
        )
    _warn_unsandboxed()
    return "none"


@cache
def why_not() -> str | None:
    """Reason why namespaces do not work on this machine, determined by trying; None if they do."""
    try:
        with Sandbox(SandboxLimits(), "namespaces") as sandbox:
            ran = sandbox.run(["true"])
    except PalestraError as error:
        return str(error)
    return None if ran.ok else f"a first command in namespaces failed: {ran.output.strip() or ran.stopped}"


@cache
def _warn_unsandboxed() -> None:
    who = (
        "as a user of its own: it can use the network and read and change every file that all users may"
        if os.geteuid() == 0
        else "as you: it can read, change and delete your files, read the keys of your programs, end them, and use "
        "the network"
    )
    log.warning(
        "allow_unsandboxed: code that the model writes runs WITHOUT A SANDBOX, %s. Time, memory, processes and disk "
        "are watched, but code that means to can get around that, and can outlive the run",
        who,
    )
