"""The first process inside of a sandbox: runs the model's commands one by one, within limits.

It is sent as text to the Python inside, so it uses the standard library alone. Requests and answers are JSON lines on
stdin and stdout. When stdin ends, because the trainer closed it or died, the sandbox ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import stat
import struct
import subprocess
import sys
import time
from typing import IO, Any

POLL_S = 0.05
FLOOD = 100  # a command that writes this many times what is kept of its output is stopped
MIB = 2**20
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1, 4, 22, 24, 36, 38
)  # fmt: skip
LINUX = sys.platform == "linux"


def prctl(*arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(*arguments))


def install_filter(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    if prctl(PR_SET_SECCOMP, 2, header, 0, 0):
        raise OSError("the kernel takes no seccomp filter")


def remove_tree(path: str) -> None:
    """Delete a folder, however deep it is, however long its paths are, and whatever its rights were set to.

    One folder is open at a time, and is left by its "..", so that neither paths nor open files add up.
    """
    os.chmod(path, 0o700)
    folder, names = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), []
    try:
        while True:
            inner = _unlink_files(folder)
            if inner is not None:
                os.chmod(inner, 0o700, dir_fd=folder)
                names.append(inner)
            elif not names:
                break
            next_folder = os.open(inner or "..", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = next_folder
            if inner is None:
                os.rmdir(names.pop(), dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(path)


def _unlink_files(folder: int) -> str | None:
    """Delete files and links up to the first folder, and return its name."""
    for name in os.listdir(folder):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return name
        os.unlink(name, dir_fd=folder)
    return None


def folder_size(path: str) -> tuple[float, int]:
    """Bytes and number of files below a folder of the host. What cannot be looked at counts as infinite."""
    size, count, waiting = 0, 0, [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return float("inf"), count
    return size, count


def processes() -> dict[int, int]:
    """All processes that are seen from here, with their parents."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except (ValueError, OSError, IndexError):  # no process, or one that has just ended
            continue
    return parents


def memory(pids: list[int]) -> int:
    """Bytes of memory that these processes hold, without the files of programs."""
    return sum(_kib(f"/proc/{pid}/status", "RssAnon", "RssShmem", "VmSwap") for pid in pids) * 1024


def shared_memory(pids: list[int]) -> int:
    """The same, each page that several share counted once; slower. A process that hides its pages counts in full."""
    total = 0
    for pid in pids:
        pages = _kib(f"/proc/{pid}/smaps_rollup", "Pss_Anon", "Pss_Shmem", "SwapPss")
        total += pages * 1024 or memory([pid])
    return total


def _kib(path: str, *fields: str) -> int:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if line.split(":")[0] in fields)
    except (OSError, ValueError, IndexError):
        return 0


class CommandRunner:
    """Runs commands with `limits`, in the current folder.

    `private` says that this process and its commands are the only ones of their user or of their process namespace.
    """

    def __init__(self, limits: dict[str, Any], private: bool, tmpfs: bool, program: bytes) -> None:
        self.limits, self.private, self.tmpfs, self.program = limits, private, tmpfs, program
        self.folder = "."  # which stays ours, whatever becomes of the folders above it

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "read" in request:
            return {"text": self.read(request["read"])}
        for name, text in request["files"].items():
            try:
                self.write(name, text)
            except OSError as error:
                return {"output": f"{name} cannot be written: {error.strerror}\n", "exit_code": 1, "stopped": "disk"}
        return self.run(request["command"], request["stdin"].encode("utf-8", "replace"))

    def write(self, name: str, text: str) -> None:
        path = self.path(name, make_parents=True)
        if os.path.isdir(path) and not os.path.islink(path):
            remove_tree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(text.encode("utf-8", "replace"))

    def read(self, name: str) -> str | None:
        with contextlib.suppress(OSError):
            handle = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    return file.read(self.limits["output_bytes"]).decode("utf-8", "replace")
        return None

    def path(self, name: str, make_parents: bool = False) -> str:
        """The path of a file in the folder; links that a command left in the way are not followed."""
        parent = self.folder
        for part in name.split("/")[:-1]:
            parent = os.path.join(parent, part)
            if make_parents and os.path.lexists(parent) and (os.path.islink(parent) or not os.path.isdir(parent)):
                os.unlink(parent)
            if make_parents and not os.path.isdir(parent):
                os.mkdir(parent, 0o700)
            if os.path.islink(parent):
                raise FileNotFoundError(parent)
        return os.path.join(parent, name.split("/")[-1])

    def run(self, command: list[str], stdin: bytes) -> dict[str, Any]:
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=self.limit,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return {"output": f"{command[0]} cannot be started: {error}\n", "exit_code": 127, "stopped": None}
        output = Output(process, stdin, self.limits["output_bytes"])
        exit_code = stopped = None
        while exit_code is None and stopped is None:
            output.pump(POLL_S)
            exit_code = self.reap(process)
            stopped = self.broken_limit(time.monotonic() - began, output.size)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # all that there is without /proc
        self.end_all()
        if exit_code is None:
            exit_code = -signal.SIGKILL
        elif exit_code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):  # the kernel's own limit came first
            stopped = "time"
        process.returncode = exit_code  # we have reaped it, not subprocess
        output.finish()
        return {"output": output.text(), "exit_code": exit_code, "stopped": stopped}

    def limit(self) -> None:
        """Runs in the command's process, before it is the command."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        memory, seconds = self.limits["memory_mib"] * MIB, max(1, round(self.limits["seconds"]))
        for kind, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, self.limits["disk_mib"] * MIB),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_NOFILE, 256),
        ):
            with contextlib.nullcontext() if LINUX else contextlib.suppress(ValueError):  # macOS knows not all of them
                resource.setrlimit(kind, (most, most))
        if self.private:  # elsewhere all processes of the user would count
            resource.setrlimit(resource.RLIMIT_NPROC, (self.limits["processes"],) * 2)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if self.program:
            install_filter(self.program)

    def broken_limit(self, seconds: float, output_size: int) -> str | None:
        if seconds > self.limits["seconds"]:
            return "time"
        if output_size > FLOOD * self.limits["output_bytes"]:
            return "output"
        pids = self.descendants()
        if len(pids) > self.limits["processes"]:
            return "processes"
        most = self.limits["memory_mib"] * MIB
        if memory(pids) > most and shared_memory(pids) > most:
            return "memory"
        if self.tmpfs:  # which has a size, but perhaps no limit on the number of files
            space = os.statvfs(self.folder)
            size, count = 0.0, space.f_files - space.f_ffree
        else:
            size, count = folder_size(self.folder)
        return "disk" if size > self.limits["disk_mib"] * MIB or count > self.limits["files"] else None

    def descendants(self) -> list[int]:
        """The processes of the command. Orphans come to this process, so all have it above them."""
        parents = processes()
        below: list[int] = []
        above = {os.getpid()}
        while above := {pid for pid, parent in parents.items() if parent in above and pid not in below}:
            below += above
        return below

    def reap(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code of the command, if it has ended. The orphans that ended are forgotten."""
        exit_code = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == process.pid:
                    exit_code = os.waitstatus_to_exitcode(ended[1])
        return exit_code

    def end_all(self) -> None:
        """Kill whatever the command has started, and wait until it is gone."""
        give_up = time.monotonic() + 3
        while time.monotonic() < give_up:
            if self.private:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in self.descendants():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:  # no process is left
                return
            time.sleep(0.002)


class Output:
    """Writes a command's stdin and collects its output; keeps the beginning."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, keep: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout, self.waiting, self.keep = process.stdin, process.stdout, stdin, keep
        self.kept, self.size = bytearray(), 0
        self.selector = selectors.DefaultSelector()
        for pipe, event in ((self.stdin, selectors.EVENT_WRITE), (self.stdout, selectors.EVENT_READ)):
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, event)
        self.selector.register(0, selectors.EVENT_READ)

    def pump(self, seconds: float) -> None:
        """Transfer data that is ready; wait at most `seconds` for it."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj == 0:  # the trainer sends nothing while a command runs: it has ended
                sys.exit(0)
            elif key.fileobj is self.stdin:
                try:
                    self.waiting = self.waiting[os.write(key.fd, self.waiting) :]
                except OSError:  # it has ended, or reads nothing
                    self.waiting = b""
                if not self.waiting:
                    self.close(self.stdin)
            else:
                self.take(key.fd)

    def take(self, handle: int) -> bool:
        try:
            chunk = os.read(handle, 65536)
        except BlockingIOError:
            return False
        if not chunk:
            self.close(self.stdout)
            return False
        self.size += len(chunk)
        self.kept += chunk[: self.keep - len(self.kept)]
        return True

    def finish(self) -> None:
        """Take what is left in the pipe. A process that escaped the kill may hold it open, so nothing is waited for."""
        while not self.stdout.closed and self.take(self.stdout.fileno()):
            pass
        for pipe in (self.stdin, self.stdout):
            self.close(pipe)
        self.selector.close()

    def close(self, pipe: IO[bytes]) -> None:
        if not pipe.closed:
            self.selector.unregister(pipe)
            pipe.close()

    def text(self) -> str:
        text = bytes(self.kept).decode("utf-8", "replace")
        return text if self.size <= self.keep else f"{text}\n[… {self.size - self.keep} more bytes]"


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    setup = json.loads(sys.stdin.buffer.readline())
    os.chdir(setup["folder"])
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one signal that Python would let a command send us
    if LINUX:
        for capability in range(64):
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if setup["uid"] is not None:
        become(setup["uid"])
    if LINUX:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # commands have the same user: our memory and files are not theirs
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.getpid() == 1:  # elsewhere the parent is a thread of the trainer, which may end before the sandbox
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    program = bytes.fromhex(setup["seccomp"]) if LINUX else b""
    inside = CommandRunner(setup["limits"], os.getpid() == 1 or setup["uid"] is not None, setup["tmpfs"], program)
    answer: dict[str, Any] = {"ready": True}
    try:
        while True:
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
            line = sys.stdin.buffer.readline()
            if not line:
                break
            answer = inside.answer(json.loads(line))
    except BrokenPipeError:
        pass
    finally:
        inside.end_all()
        if not setup["tmpfs"]:
            os.chdir("/")
            remove_tree(setup["folder"])


if __name__ == "__main__":
    main()
