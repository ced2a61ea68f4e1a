"""Runs an agent's program in isolation: it reaches the gateway by one port, and sees its own files.

    python -m palestra.envs.sandbox.program '{"visible": …, "port": 8000, "socket": "/tmp/…/gateway"}' COMMAND…

Namespaces have their own loopback. The process that made them listens there and hands each connection on to the
gateway's Unix socket; the program is a child with another root folder, another user, and no way back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from palestra.envs.sandbox import namespaces as ns
from palestra.envs.sandbox.inside import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, become, install_filter, prctl
from palestra.envs.sandbox.isolation import seccomp_filter, visible

_DISK_MIB, _FILES = 256, 20_000  # of its /tmp
# what clients of HTTP read when they start, though they use none of it here
_SYSTEM = [
    f"/etc/{name}" for name in ("ssl/certs", "ssl/openssl.cnf", "pki/tls", "hosts", "nsswitch.conf", "localtime")
]
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class ProgramSandbox:
    """Isolation of programs that may reach the gateway alone. `socket` is the gateway's."""

    port: int
    socket: str
    hidden: Sequence[Path] = ()  # files and folders that a program does not see in its own folder either

    def command(self, command: Sequence[str], folder: Path, cwd: str | None) -> list[str]:
        """The command line that runs a command with `folder`, the attempt's, as the only one that it may write to."""
        uid = None
        if os.geteuid() == 0:
            uid = random.SystemRandom().randrange(2_000_000, 2**31)
            for path in (folder, *folder.iterdir()):
                os.chown(path, uid, uid)
        own = program_paths(command, Path(cwd or os.getcwd()))
        shown = visible() | dict.fromkeys([*filter(os.path.exists, _SYSTEM), *own], "")
        setup = {
            "port": self.port,
            "socket": self.socket,
            "visible": shown,
            "hidden": paths_below(shown, self.hidden, [Path(cwd or "", word).resolve() for word in ("", *command)]),
            "folder": str(folder),
            "cwd": cwd or os.getcwd(),
            "uid": uid,
            "seccomp": (seccomp_filter(os.uname().machine) or b"").hex(),
        }
        return [sys.executable, "-P", "-m", "palestra.envs.sandbox.program", json.dumps(setup), *command]


def program_paths(command: Sequence[str], cwd: Path) -> list[str]:
    """The folders of the files that a command names; of one in `bin` the folder above, where its libraries are."""
    files = [Path(shutil.which(command[0]) or command[0]), *(cwd / word for word in command[1:])]
    paths: list[Path] = []
    for file in (path for each in files if each.is_file() for path in (each.absolute(), each.resolve())):
        folder = file.parent.parent if file.parent.name == "bin" else file.parent
        is_broad = Path.home().is_relative_to(folder) or folder == Path("/tmp")
        paths.append(file if is_broad else folder)
    roots = {path for path in paths if not any(path != other and path.is_relative_to(other) for other in paths)}
    return sorted(str(path) for path in roots if not path.is_relative_to("/usr"))


def paths_below(folders: Iterable[str], paths: Sequence[Path], needed: Sequence[Path]) -> list[str]:
    """The paths as they are seen below the folders, without those that the program needs: its own file, for example."""
    real = [each for path in paths if (each := path.resolve()).exists()]
    return [
        str(Path(folder, path.relative_to(root)))
        for folder, root in [(folder, Path(folder).resolve()) for folder in folders]
        for path in real
        if path != root and path.is_relative_to(root) and not any(each.is_relative_to(path) for each in needed)
    ]


def main() -> NoReturn:
    setup, command = json.loads(sys.argv[1]), sys.argv[2:]
    ns.unshare(setup["uid"] is not None)
    raise_loopback()
    listener = socket.create_server(("127.0.0.1", setup["port"]), backlog=64)
    child = os.fork()
    if child == 0:
        listener.close()
        first_process(setup, command)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # else the pipes would stay open as long as this process
        os.dup2(null, stream)
    asyncio.run(forward(listener, setup["socket"], os.pidfd_open(child)))
    os._exit(exit_code(os.waitpid(child, 0)[1]))


def raise_loopback() -> None:
    """A new network namespace has a loopback, which is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def first_process(setup: dict[str, object], command: list[str]) -> NoReturn:
    """Process 1 inside: starts the program and waits for it; all that it has left ends with this one."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    ns.check(ns.libc.unshare(ns.NEW_NS), "unshare")  # the one outside keeps its root, where the gateway's socket is
    ns.libc.sethostname(b"sandbox", 7)
    ns.new_root(setup["visible"], _DISK_MIB, _FILES, "/tmp", str(setup["folder"]))  # type: ignore[arg-type]
    for path in sorted(setup["hidden"]):  # type: ignore[call-overload]
        if os.path.isdir(path):
            ns.mount("tmpfs", path, "tmpfs", ns.MS_RDONLY | ns.MS_NOSUID | ns.MS_NODEV, "size=4k")
        elif os.path.exists(path):  # not below a folder that is hidden
            ns.mount("/dev/null", path, None, ns.MS_BIND)
    program = os.fork()
    if program == 0:
        start(setup, command)
    while (ended := os.wait())[0] != program:
        pass
    os._exit(exit_code(ended[1]))


def start(setup: dict[str, object], command: list[str]) -> NoReturn:
    """Replace this process by the program, as another user that cannot gain privileges."""
    os.chdir(cwd if os.path.isdir(cwd := str(setup["cwd"])) else "/tmp")
    os.environ.update(HOME="/tmp", TMPDIR="/tmp")
    if isinstance(setup["uid"], int):
        become(setup["uid"])
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    install_filter(bytes.fromhex(str(setup["seccomp"])))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror} (in the sandbox)", file=sys.stderr, flush=True)
        os._exit(127)


async def forward(listener: socket.socket, path: str, process: int) -> None:
    """Hand each connection on to the gateway until a process ends (by its pidfd). Here no thread can be started."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, ended.set)

    async def hand_on(inside: asyncio.StreamReader, to_inside: asyncio.StreamWriter) -> None:
        outside, to_outside = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(inside, to_outside), pump(outside, to_inside))

    await asyncio.start_server(hand_on, sock=listener)
    await ended.wait()


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_READ):
            target.write(data)
            await target.drain()
    target.close()


def exit_code(status: int) -> int:
    """As a shell reports it: 128 plus the signal for a program that was killed by one."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
