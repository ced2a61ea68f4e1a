"""Limits of a sandbox: what it sees of the system, a control group, and a filter of system calls."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Isolation = Literal["namespaces", "none"]

PYTHON = str(Path(sys.base_prefix, "bin", "python3"))  # the interpreter as a sandbox sees it
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one attempt, for all its processes together; `seconds` and `output_bytes` are for each command."""

    seconds: float = 10.0
    memory_mib: int = 512  # without its files
    processes: int = 32
    disk_mib: int = 64
    files: int = 2000
    output_bytes: int = 32_000


def visible() -> dict[str, str]:
    """Programs and libraries of the system that a command may read: path → the target of a link, or an empty text."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
    paths = system if Path(sys.base_prefix).is_relative_to("/usr") else [*system, os.path.realpath(sys.base_prefix)]
    targets = {path: os.readlink(path) if os.path.islink(path) else "" for path in paths if os.path.lexists(path)}
    if not any(Path(sys.base_prefix).is_relative_to(path) for path in targets):
        targets[sys.base_prefix] = os.path.realpath(sys.base_prefix)
    return targets


# Denied system calls, by architecture: nested namespaces and mounts; memory that belongs to no process (System V IPC,
# message queues, memfd); looking into other processes; rarely used kernel interfaces.
DENIED = {
    "x86_64": dict(
        shmget=29, semget=64, msgget=68, ptrace=101, pivot_root=155, chroot=161, mount=165, umount2=166, reboot=169,
        init_module=175, delete_module=176, mq_open=240, kexec_load=246, add_key=248, request_key=249, keyctl=250,
        unshare=272, perf_event_open=298, open_by_handle_at=304, setns=308, process_vm_readv=310,
        process_vm_writev=311, finit_module=313, memfd_create=319, bpf=321, userfaultfd=323,
    ),
    "aarch64": dict(
        shmget=194, semget=190, msgget=186, ptrace=117, pivot_root=41, chroot=51, mount=40, umount2=39, reboot=142,
        init_module=105, delete_module=106, mq_open=180, kexec_load=104, add_key=217, request_key=218, keyctl=219,
        unshare=97, perf_event_open=241, open_by_handle_at=265, setns=268, process_vm_readv=270,
        process_vm_writev=271, finit_module=273, memfd_create=279, bpf=280, userfaultfd=282,
    ),
}  # fmt: skip
DENIED_EVERYWHERE = dict(
    pidfd_getfd=438, io_uring_setup=425, io_uring_enter=426, io_uring_register=427, open_tree=428, move_mount=429,
    fsopen=430, fsconfig=431, fsmount=432, fspick=433, mount_setattr=442, memfd_secret=447,
)  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMESPACE_FLAGS = 0x7E020000


def seccomp_filter(machine: str) -> bytes | None:
    """A BPF program that refuses the system calls above and permits all others; None where there is no list."""
    if machine not in DENIED:
        return None
    load, jump_equal, jump_from, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, errno = 0x80000000, 0x7FFF0000, 0x00050000
    eperm, enosys = errno | 1, errno | 38

    def op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    program = [op(load, 4), op(jump_equal, AUDIT_ARCH[machine], 1, 0), op(give, kill), op(load, 0)]
    if machine == "x86_64":  # x32 calls have different numbers
        program += [op(jump_from, 0x40000000, 0, 1), op(give, eperm)]
    program += [op(jump_equal, CLONE3, 0, 1), op(give, enosys)]  # its flags cannot be seen: libc then takes clone
    for number in (*DENIED[machine].values(), *DENIED_EVERYWHERE.values()):
        program += [op(jump_equal, number, 0, 1), op(give, eperm)]
    program += [op(jump_equal, CLONE[machine], 0, 3), op(load, 16), op(jump_set, NAMESPACE_FLAGS, 0, 1)]
    return b"".join([*program, op(give, eperm), op(give, allow)])


ROOT = Path("/sys/fs/cgroup")
_NAME = "palestra-sandbox"
_OURS_MIB = 32  # for the first process inside


@dataclass(frozen=True)
class Cgroup:
    """Its processes, files in tmpfs, pipes and sockets count together; the kernel keeps the limits."""

    path: Path

    def enter(self) -> list[str]:
        """Put before a command line, so that it starts in the group; where that is refused, the watcher is left."""
        return ["/bin/sh", "-c", '{ echo $$ > "$0"; } 2>/dev/null; exec "$@"', str(self.path / "cgroup.procs")]

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        for _ in range(20):  # its processes take a moment to end
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)


def make_cgroup(limits: SandboxLimits, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Cgroup | None:
    """Create a group next to or below ours; None where that is not permitted."""
    try:
        names = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return None
    # a group with processes in it cannot give limits to those below, so the one above it is tried too
    parents = [path for name in names for path in (root / name, (root / name).parent) if path.is_relative_to(root)]
    for parent in parents:
        path = parent / f"{_NAME}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            controllers = (parent / "cgroup.subtree_control").read_text().split()
            if "memory" not in controllers or "pids" not in controllers:
                continue
            for stale in parent.glob(f"{_NAME}-*-*"):  # of trainers that were killed
                if not Path("/proc", stale.name.split("-")[-2]).exists():
                    with contextlib.suppress(OSError):
                        stale.rmdir()
            path.mkdir()
        except OSError:
            continue
        try:
            (path / "memory.max").write_text(str((limits.memory_mib + limits.disk_mib + _OURS_MIB) * 2**20))
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (path / "memory.swap.max").write_text("0")
            (path / "pids.max").write_text(str(limits.processes + 8))  # and the few that set the sandbox up
            if os.access(path / "cgroup.procs", os.W_OK):
                return Cgroup(path)
        except OSError:
            pass
        Cgroup(path).remove()
    return None
