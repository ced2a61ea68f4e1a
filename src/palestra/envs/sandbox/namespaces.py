"""Runs a command in new namespaces, with its own root folder.

    python3 -IS namespaces.py '{"visible": …, "root": false, "disk_mib": 64, "files": 2000}' COMMAND…

It runs before anything of ours can be imported, so it uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    1, 2, 4, 32, 4096, 16384, 1 << 18, 1 << 21
)  # fmt: skip
ST_RELATIME = 4096
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime: the same bits in statvfs and mount
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG = 1
USER = 1000  # the id of an ordinary user inside

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mounting {target}")


def unshare(root: bool) -> None:
    """Enter new namespaces. Root may create them; other users need a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    kinds = NEW_NS | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET
    check(libc.unshare(kinds if root else kinds | NEW_USER), "unshare")
    if not root:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{USER} {uid} 1"), ("gid_map", f"{USER} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)


def new_root(visible: dict[str, str], disk_mib: int, files: int, folder: str = "/work", writable: str = "") -> None:
    """Enter a new root: the visible folders read-only, /proc, a few devices, and a tmpfs of limited size.

    That is `folder`, and /tmp. `writable` is one more folder of outside, to read and to write.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"old"), "pivot_root")
    os.chdir("/")
    os.mkdir(folder)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mib}m,nr_inodes={files + 1},mode=1777")
    if folder != "/tmp":
        os.symlink(folder, "/tmp")
    if writable:
        bind(writable, read_only=False)
    for path, link in visible.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if link:
            os.symlink(link, path)
        else:
            bind(path)
    os.makedirs("/proc", exist_ok=True)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | 8)
    os.mkdir("/dev")
    for device in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{device}", read_only=False)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def bind(path: str, read_only: bool = True) -> None:
    """Show a file or folder of the old root at the same path in the new one."""
    source = "/old" + path
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        open(path, "w").close()
    mount(source, path, None, MS_BIND | MS_REC)
    if not read_only:
        return
    with open("/old/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split()[4].replace("\\040", " ") for line in file]
    for point in points:  # one by one: changing the rights of a mount leaves those below it alone
        if point == path or point.startswith(path + "/"):
            flags = os.statvfs(point).f_flag
            kept_flags = (flags & KEPT_FLAGS) | (MS_RELATIME if flags & ST_RELATIME else 0)
            mount(None, point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept_flags)


def main() -> None:
    setup, command = json.loads(sys.argv[1]), sys.argv[2:]
    unshare(setup["root"])
    child = os.fork()
    if child:
        os.closerange(0, 2)  # the ends of the trainer's socket are the child's alone
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.sethostname(b"sandbox", 7)
    new_root(setup["visible"], setup["disk_mib"], setup["files"])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
