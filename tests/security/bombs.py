"""Programs that try to use up more than a sandbox gives. Each prints how many MiB, files or processes it got.

All of them stop by themselves: a machine without limits is not harmed.
"""

from textwrap import indent

MOST_MIB = 1024
PREAMBLE = (
    f"MOST = {MOST_MIB}\n"
    + """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
got, held = 0, []
def said(value):
    print("GOT", value, flush=True)
"""
)


def until_refused(step: str, *, before: str = "", most: str = "MOST", amount: int = 1) -> str:
    """Repeat a step, which gets hold of `amount`, until the system refuses it."""
    loop = f"{before}\nwhile got < {most}:\n{indent(step, '    ')}\n    got += {amount}"
    return f"try:\n{indent(loop, '    ')}\nexcept OSError:\n    pass\nsaid(got)\n"


def write_mib(name: str) -> str:
    return f'with open(f"{name}", "wb", buffering=0) as file:\n    file.write(bytes(2**20))'


MEMFD = until_refused('held.append(os.memfd_create("x"))\nos.write(held[-1], bytes(15 * 2**20))', amount=15)
SYSV_SHM = """
libc.shmat.restype = ctypes.c_void_p
while got < MOST:
    segment = libc.shmget(0, 16 * 2**20, 0o1600)
    if segment < 0:
        break
    where = libc.shmat(segment, None, 0)
    ctypes.memset(where, 1, 16 * 2**20)
    libc.shmdt(ctypes.c_void_p(where))
    got += 16
said(got)
"""

NESTED_NAMESPACES = """
if libc.unshare(0x10000000 | 0x00020000) == 0:            # user and mount namespace
    libc.mount(b"none", b"/work", b"tmpfs", 0, b"size=2g")
    with open("/work/big", "wb") as file:
        while got < MOST:
            file.write(bytes(2**20))
            got += 1
for flags in (0x10000000, 0x00020000, 0x20000000):        # the same by clone, which is another system call
    if libc.syscall(56, flags | 17, 0, 0, 0, 0) >= 0:
        got += MOST
said(got)
"""

UNLINKED_FILES = until_refused("""
if got % 15 == 0:
    held.append(open("gone", "wb", buffering=0))
    os.unlink("gone")
held[-1].write(bytes(2**20))
""")
LONG_PATHS = until_refused(
    write_mib("f{got}"), before='for level in range(17):\n    os.mkdir("d" * 250)\n    os.chdir("d" * 250)'
)
CLOSED_FOLDER = until_refused(write_mib("closed/f{got}"), before='os.mkdir("closed")\nos.chmod("closed", 0o300)')
DEEP_FOLDERS = until_refused('os.mkdir("d")\nos.chdir("d")', most="5000")
MANY_FILES = until_refused('open(f"f{got}", "w").close()', most="5000")

MANY_PROCESSES_WITH_MEMORY = """
for _ in range(10):
    if os.fork() == 0:
        held = bytearray(100 * 2**20)
        for i in range(0, len(held), 4096):
            held[i] = 1
        said("child")
        time.sleep(20)
        os._exit(0)
time.sleep(3)
said("all")
"""

HIDDEN_PROCESSES_WITH_MEMORY = MANY_PROCESSES_WITH_MEMORY.replace(
    "        held =", "        libc.prctl(4, 0, 0, 0, 0)\n        held ="
)

PROCESSES = until_refused("if os.fork() == 0:\n    os.setsid()\n    time.sleep(20)\n    os._exit(0)", most="300")
