"""A control group for each sandbox, where this process may make some: cgroup v2, delegated to it."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.sandbox.isolation import SandboxLimits

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
    """A group beside or below our own; None where that is not permitted."""
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
