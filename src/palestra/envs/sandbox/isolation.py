"""How a sandbox is isolated: by bubblewrap, by namespaces of our own, or by podman or docker."""

from __future__ import annotations

import json
import os
import shutil
import sys
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
    """What one attempt may use up, all its processes together; `seconds` and `output_bytes` are for each command."""

    seconds: float = 10.0
    memory_mib: int = 512  # beside its files
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
    """What of the system a command may read, programs and libraries: path → what it is a link to, or nothing."""
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
    variables = [word for key, value in _inside().items() for word in ("--env", f"{key}={value}")]
    return [
        _program(runtime), "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only",
        "--hostname", "sandbox", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{uid}:{uid}",
        "--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes + 8), "--shm-size", "1m",
        "--tmpfs", f"/work:rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mib}m", "--workdir", "/work",
        *variables, image,
    ]  # fmt: skip


def _inside() -> dict[str, str]:
    return {"HOME": "/work", "TMPDIR": "/work", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


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
