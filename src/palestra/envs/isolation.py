"""How a command is shut in: by bubblewrap, by namespaces of unshare or, where neither works, by limits alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Isolation = Literal["bubblewrap", "namespaces", "limits"]

CLEAN_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
PYTHON = str(Path(sys.base_prefix, "bin", "python3"))  # the interpreter as a sandbox sees it


@dataclass(frozen=True)
class SandboxLimits:
    """What a command may use up. Memory, CPU time and file size are per process, the rest is for all together."""

    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 32
    file_mib: int = 16  # one file
    disk_mib: int = 64  # all files
    files: int = 2000
    output_bytes: int = 32_000


# Runs inside: dash takes -p for the number of processes, bash -u. -f counts blocks of 512 bytes.
_LIMITED = (
    "ulimit -c 0; ulimit -v {memory_kib}; ulimit -f {file_blocks}; ulimit -t {cpu_seconds}; ulimit -n 256; "
    'ulimit -u {processes} 2>/dev/null || ulimit -p {processes}; exec "$@"'
)

# Runs as root of new namespaces: a root folder of its own, with the system read-only, and no way back to the old one.
_NEW_ROOT = """
set -e
outer=$PATH; PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$1; work=$2; shift 2
mount --make-rprivate /
cd "$work"
mount -t tmpfs -o mode=755,size=16m none "$root"
for path in $1; do
    if [ -L "$path" ]; then ln -s "$(readlink "$path")" "$root$path"
    elif [ -d "$path" ]; then mkdir -p "$root$path"; mount --rbind "$path" "$root$path"
        mount -o remount,bind,ro "$root$path"
    elif [ -e "$path" ]; then mkdir -p "$(dirname "$root$path")"; touch "$root$path"; mount --bind "$path" "$root$path"
    fi
done
shift
mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$root/old" "$root/work"
mount -t proc proc "$root/proc"
for node in null zero random urandom; do touch "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"; done
mount --no-canonicalize --bind . "$root/work"  # by its folder, for the new root may lie over its path
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
chmod 1777 /tmp
cd /work
export HOME=/work TMPDIR=/work PATH="$outer"
exec "$@"
"""


def wrap(
    command: Sequence[str], folder: Path, limits: SandboxLimits, isolation: Isolation, uid: int | None
) -> list[str]:
    """The command line that runs `command` shut in, with `folder` as its working folder.

    `uid` is the user that it becomes when we are root; otherwise it stays who we are, in a user namespace.
    """
    script = _LIMITED.format(
        memory_kib=limits.memory_mib * 1024,
        file_blocks=limits.file_mib * 2048,
        cpu_seconds=max(1, round(limits.seconds)),
        processes=limits.processes,
    )
    limited = [*_become(uid), "sh", "-c", script, "sh", *command]
    match isolation:
        case "bubblewrap":
            return [*_bubblewrap(folder, uid), *limited]
        case "namespaces":
            return [*_namespaces(folder, uid), *limited]
        case "limits":
            return limited


def _become(uid: int | None) -> list[str]:
    if uid is None:
        return []
    return [
        "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--inh-caps=-all",
        "--bounding-set=-all",
    ]  # fmt: skip


def _visible() -> list[str]:
    """What of the system a command may read: programs and libraries, nothing of the user's."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
    paths = system if Path(sys.base_prefix).is_relative_to("/usr") else [*system, sys.base_prefix]
    return [path for path in paths if os.path.lexists(path)]


def _bubblewrap(folder: Path, uid: int | None) -> list[str]:
    # as root no user namespace is needed, and the rights to become another user are kept until that is done
    who = ["--unshare-all"] if uid is None else ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if uid is not None:
        who += [word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")]
    # parents would be made as closed as they are outside: a Python below /root could not be reached
    closed = [str(path) for path in reversed(Path(sys.base_prefix).parents) if path != Path("/")]
    mounts = [word for path in closed if path != "/usr" for word in ("--perms", "0755", "--dir", path)]
    for path in _visible():
        mounts += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    return [
        "bwrap", *who, "--die-with-parent", "--new-session", *mounts, "--proc", "/proc", "--dev", "/dev",
        "--remount-ro", "/dev", "--bind", str(folder), "/work", "--remount-ro", "/", "--chdir", "/work",
        "--setenv", "HOME", "/work", "--setenv", "TMPDIR", "/work", "--",
    ]  # fmt: skip


def _namespaces(folder: Path, uid: int | None) -> list[str]:
    who = ["--user", "--map-root-user"] if uid is None else []
    new = ["unshare", *who, "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    root = tempfile.gettempdir()  # only a place to mount on, seen by nobody outside
    dropped = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"] if uid is None else []
    return [*new, "sh", "-c", _NEW_ROOT, "sh", root, str(folder), " ".join(_visible()), *dropped]


@cache
def best_isolation() -> Isolation:
    """The strongest isolation that works on this machine, found by trying."""
    kinds: tuple[tuple[Isolation, str], ...] = (("bubblewrap", "bwrap"), ("namespaces", "unshare"))
    for kind, program in kinds:
        if shutil.which(program) and works(kind):
            return kind
    return "limits"


def works(isolation: Isolation) -> bool:
    """Whether a command can be shut in this way here."""
    uid = 2_000_000 if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        command = wrap(["true"], Path(folder), SandboxLimits(), isolation, uid)
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=10, check=False, cwd=folder, env=CLEAN_ENVIRONMENT
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0
