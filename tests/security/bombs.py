"""Programs that try to use up more than a sandbox gives. Each prints how many MiB, files or processes it got.

All of them stop by themselves: a machine without limits is not harmed.
"""

MOST_MIB = 1024

PREAMBLE = (
    f"MOST = {MOST_MIB}\n"
    + """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
got = 0
def said(value):
    print("GOT", value, flush=True)
"""
)

MEMFD = """
held = []
try:
    while got < MOST:
        held.append(os.memfd_create("x"))
        os.write(held[-1], bytes(15 * 2**20))
        got += 15
except OSError:
    pass
said(got)
"""

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

UNLINKED_FILES = """
try:
    while got < MOST:
        file = open("gone", "wb", buffering=0)
        os.unlink("gone")
        held = globals().setdefault("held", [])
        held.append(file)
        for _ in range(15):
            file.write(bytes(2**20))
            got += 1
except OSError:
    pass
said(got)
"""

LONG_PATHS = """
try:
    for level in range(17):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    while got < MOST:
        with open(f"f{got}", "wb", buffering=0) as file:
            file.write(bytes(2**20))
        got += 1
except OSError:
    pass
said(got)
"""

CLOSED_FOLDER = """
os.mkdir("closed")
os.chmod("closed", 0o300)
try:
    while got < MOST:
        with open(f"closed/f{got}", "wb", buffering=0) as file:
            file.write(bytes(2**20))
        got += 1
except OSError:
    pass
said(got)
"""

DEEP_FOLDERS = """
try:
    while got < 5000:
        os.mkdir("d")
        os.chdir("d")
        got += 1
except OSError:
    pass
said(got)
"""

MANY_FILES = """
try:
    while got < 5000:
        open(f"f{got}", "w").close()
        got += 1
except OSError:
    pass
said(got)
"""

MANY_PROCESSES_WITH_MEMORY = """
held = None
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

PROCESSES = """
try:
    while got < 300:
        if os.fork() == 0:
            os.setsid()
            time.sleep(20)
            os._exit(0)
        got += 1
except OSError:
    pass
said(got)
"""
