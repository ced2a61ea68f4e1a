"""How a sandbox is isolated: by bubblewrap, by our own namespaces, or by podman or docker.

Also its limits: a control group, and a filter of system calls."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Isolation = Literal["bubblewrap", "namespaces", "podman", "docker", "none"]

PYTHON = str(Path(sys.base_prefix, "bin", "python3"))  # the interpreter as a sandbox sees it
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
CONTAINER_IMAGE = "docker.io/library/python:3.11-slim"

# Reads its own program from stdin: the same in a folder, a namespace and a container.
_BOOT = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"


_NAMESPACES = Path(__file__).with_name("namespaces.py")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one attempt, for all its processes together; `seconds` and `output_bytes` are for each command."""

    seconds: float = 10.0
    memory_mib: int = 512  # without its files
    processes: int = 32
    disk_mib: int = 64
    files: int = 2000
    output_bytes: int = 32_000


@dataclass(frozen=True)
class Shell:
    """A command line that starts the first process of a sandbox; `folder` is where that works."""

    command: list[str]
    folder: str
    tmpfs: bool
    uid: int | None  # the user that the first process becomes; None: it is already the right one
    remove: list[str] | None = None  # ends a container that does not end by itself


def visible() -> dict[str, str]:
    """What of the system a command may read, programs and libraries: path → the target of a link, or an empty text."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
    paths = system if Path(sys.base_prefix).is_relative_to("/usr") else [*system, os.path.realpath(sys.base_prefix)]
    found = {path: os.readlink(path) if os.path.islink(path) else "" for path in paths if os.path.lexists(path)}
    if not any(Path(sys.base_prefix).is_relative_to(path) for path in found):
        found[sys.base_prefix] = os.path.realpath(sys.base_prefix)
    return found


def shut_in(isolation: Isolation, limits: SandboxLimits, folder: Path, uid: int | None, image: str) -> Shell:
    """The command line for a kind of isolation. `uid` is the user that commands get when we are root."""
    inside = [PYTHON, "-ISc", _BOOT]
    match isolation:
        case "bubblewrap":
            return Shell([*_bubblewrap(limits, uid), *inside], "/work", True, uid)
        case "namespaces":
            setup = {
                "visible": visible(), "root": uid is not None, "disk_mib": limits.disk_mib, "files": limits.files
            }  # fmt: skip
            return Shell([PYTHON, "-IS", str(_NAMESPACES), json.dumps(setup), *inside], "/work", True, uid)
        case "podman" | "docker":
            name = folder.name
            command = [*_container(isolation, limits, name, uid or os.getuid(), image), "python3", "-ISc", _BOOT]
            return Shell(command, "/work", True, None, [_program(isolation), "rm", "--force", name])
        case "none":
            return Shell(inside, str(folder), False, uid)


def _bubblewrap(limits: SandboxLimits, uid: int | None) -> list[str]:
    # as root no user namespace is needed, and the rights to become another user are kept until that is done
    who = ["--unshare-all"] if uid is None else ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if uid is not None:
        who += [word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")]
    # parents would be made as closed as they are outside: a Python below /root could not be reached
    parents = {str(above) for path in visible() for above in Path(path).parents} - {"/", "/usr"}
    mounts = [word for path in sorted(parents) for word in ("--perms", "0755", "--dir", path)]
    for path, link in visible().items():
        mounts += ["--symlink", link, path] if link else ["--ro-bind", path, path]
    return [
        _program("bubblewrap"), *who, "--as-pid-1", "--new-session", "--hostname", "sandbox", *mounts,
        "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--perms", "1777",
        "--size", str(limits.disk_mib * 2**20), "--tmpfs", "/work", "--symlink", "/work", "/tmp",
        "--remount-ro", "/", "--chdir", "/work", "--",
    ]  # fmt: skip


def _container(runtime: str, limits: SandboxLimits, name: str, uid: int, image: str) -> list[str]:
    memory = f"{limits.memory_mib + limits.disk_mib + 64}m"
    inside = {"HOME": "/work", "TMPDIR": "/work", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    variables = [word for key, value in inside.items() for word in ("--env", f"{key}={value}")]
    return [
        _program(runtime), "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only",
        "--hostname", "sandbox", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{uid}:{uid}",
        "--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes + 8), "--shm-size", "1m",
        "--tmpfs", f"/work:rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mib}m", "--workdir", "/work",
        *variables, image,
    ]  # fmt: skip


def environment(shell: Shell) -> dict[str, str]:
    """The environment variables of a sandbox: nothing of ours. A container runtime needs a home to find its images."""
    ours = {key: os.environ[key] for key in ("HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST") if key in os.environ}
    return ENVIRONMENT | (ours if shell.remove else {"HOME": shell.folder, "TMPDIR": shell.folder})


def installed(isolation: Isolation) -> bool:
    """Whether the program that a kind of isolation needs is there."""
    return isolation in ("namespaces", "none") or shutil.which(_program(isolation)) is not None


def _program(isolation: str) -> str:
    """Its full path, by our own PATH: that of a sandbox is another."""
    name = "bwrap" if isolation == "bubblewrap" else isolation
    return shutil.which(name) or name


# What a command has no use for, by architecture: nested namespaces and mounts; memory that belongs to no process
# (System V IPC, message queues, memfd); looking into other processes; rarely used kernel interfaces.
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
    for parent in _parents(root, own):
        path = parent / f"{_NAME}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            controllers = (parent / "cgroup.subtree_control").read_text().split()
            if "memory" not in controllers or "pids" not in controllers:
                continue
            _remove_stale(parent)
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


def _remove_stale(parent: Path) -> None:
    """The groups of trainers that were killed."""
    for path in parent.glob(f"{_NAME}-*-*"):
        pid = path.name.split("-")[-2]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def _parents(root: Path, own: Path) -> list[Path]:
    """Our own group, and the one above it: a group with processes in it cannot give limits to those below."""
    try:
        names = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return []
    return [path for name in names for path in ((root / name), (root / name).parent) if path.is_relative_to(root)]
