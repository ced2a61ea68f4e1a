"""`python -P isolated_child.py [--path FOLDER] (FILE | -m MODULE) ARGUMENTS`: run untrusted code.

It runs in its own user namespace, from which it cannot read the environment or memory of any process outside.
Where there are no user namespaces, this only holds for processes that called `hide_environment`.
Imports nothing of Palestra: the interpreter may not have it.
"""

import ctypes
import os
import runpy
import sys
import threading
from pathlib import Path

_CLONE_NEWUSER = 0x10000000


def isolate() -> bool:
    """Enter a new user namespace in which every id stays what it was. Only while there is one thread."""
    if sys.platform != "linux":
        return False
    me, uid, gid = os.getpid(), os.geteuid(), os.getegid()
    wait, go = os.pipe()
    helper = os.fork()  # only a process outside of the namespace may map more than one id
    if helper == 0:
        is_mapped = False
        try:
            os.close(go)
            if os.read(wait, 1):
                _map_ids(me, uid, gid)
            is_mapped = True
        finally:
            os._exit(0 if is_mapped else 1)
    is_isolated = ctypes.CDLL(None).unshare(_CLONE_NEWUSER) == 0
    if is_isolated:
        os.write(go, b"1")
    os.close(go)
    os.close(wait)
    if os.waitpid(helper, 0)[1]:
        raise SystemExit("Error: in its new user namespace this process has no user; the system forbids to name one")
    return is_isolated


def _map_ids(pid: int, uid: int, gid: int) -> None:
    """All of them for root, whose sandboxes use other ids; one's own for other users."""
    maps = {"uid_map": f"{uid} {uid} 1", "setgroups": "deny", "gid_map": f"{gid} {gid} 1"}
    if uid == 0:  # each id that this namespace has as itself: `inside outside count` -> `inside inside count`
        ids = {name: Path("/proc/self", name).read_text().splitlines() for name in ("uid_map", "gid_map")}
        rows = {name: [line.split() for line in lines] for name, lines in ids.items()}
        maps = {name: "".join(f"{inside} {inside} {count}\n" for inside, _, count in rows[name]) for name in rows}
    for name, text in maps.items():
        Path(f"/proc/{pid}/{name}").write_text(text)


def main(words: list[str]) -> None:
    if words[:1] == ["--path"]:
        sys.path.insert(0, words[1])
        words = words[2:]
    isolate()
    if "PALESTRA_END_WITH_PARENT" in os.environ:  # stdin is a pipe that closes when the parent ends, in whatever way
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
