"""Code in the sandbox attacks it: each test tries what must not succeed, and goes red if it did."""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import wait_until

import palestra
from palestra.core.errors import NotAllowedError, ServiceError, UnsupportedError
from palestra.envs.discover import load_env
from palestra.envs.sandbox import Sandbox, SandboxLimits, isolation
from palestra.envs.sandbox import sandbox as sandbox_module
from palestra.envs.sandbox.inside import folder_size, remove_tree
from palestra.envs.sandbox.sandbox import choose_isolation, why_not

sys.path.insert(0, str(Path(__file__).parent))
import bombs

LIMITS = SandboxLimits(seconds=10, memory_mib=256, processes=16, disk_mib=8, files=200, output_bytes=2000)
ISOLATING = ["namespaces"] if sys.platform == "linux" and why_not() is None else []
LONG = f"77.{os.getpid()}"  # seconds that no other test sleeps
needs_isolation = pytest.mark.skipif(not ISOLATING, reason="this machine permits no namespaces")


@pytest.fixture(params=ISOLATING or [pytest.param("none", marks=needs_isolation)])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, request.param) as made:
        yield made


def run_python(sandbox: Sandbox, code: str):
    sandbox.write("attack.py", code)
    return sandbox.run([sandbox.python, "-I", "attack.py"])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach: pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def sleeping() -> int:
    """How many of our long sleeps there are on the machine."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout.splitlines()
    return lines.count(f"sleep {LONG}")


def test_ordinary_work_is_done(sandbox):
    ran = run_python(sandbox, "import sys; open('out.txt', 'w').write('made'); print(sum(range(10)), sys.stdin.read())")
    assert ran.output == "45 \n"
    assert ran.ok
    assert sandbox.read("out.txt") == "made"
    assert sandbox.run(["sh", "-c", "cat; ls; exit 3"], stdin="hello\n").exit_code == 3


def test_it_refuses_the_network(sandbox):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    code = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=1)
        print("CONNECTED", address)
    except OSError as error:
        print("refused")
"""
    ran = run_python(sandbox, code)
    server.close()
    assert ran.output.split() == ["refused", "refused"]


def test_it_refuses_to_read_the_users_home_and_files(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("sesame")
    tmp_path.chmod(0o755)
    home = Path.home()
    ran = sandbox.run(["sh", "-c", f"cat {secret} /etc/passwd /etc/shadow; ls -A {home}; ls /home /root"])
    assert "sesame" not in ran.output
    assert "root:x" not in ran.output
    visible = sandbox.run(["sh", "-c", f"find {home} -type f 2>/dev/null | grep -v '^{sys.base_prefix}' | head -5"])
    assert visible.output == ""


def got(sandbox: Sandbox, bomb: str) -> int:
    """What a bomb got hold of before something stopped it."""
    ran = run_python(sandbox, bombs.PREAMBLE + bomb)
    assert "GOT" in ran.output, ran
    return int(ran.output.split("GOT")[1].split()[0])


BOMBS = {  # ATTACKS: bomb -> the most that it may get
    "MEMFD": 0,
    "SYSV_SHM": 0,
    "NESTED_NAMESPACES": 0,
    "UNLINKED_FILES": LIMITS.disk_mib,
    "LONG_PATHS": LIMITS.disk_mib,
    "CLOSED_FOLDER": LIMITS.disk_mib,
}


def test_no_bomb_gets_more_memory_or_disk_than_the_limits(sandbox):
    """One after the other in one attempt: what one leaves behind also counts for the next."""
    for name, most in BOMBS.items():
        assert got(sandbox, getattr(bombs, name)) <= most, name
    assert sandbox.run(["sh", "-c", "rm -rf closed d*; echo ok > after.txt"]).exit_code in (0, 1)


@pytest.mark.parametrize("bomb", ["DEEP_FOLDERS", "MANY_FILES"])
def test_the_number_of_files_is_limited(sandbox, bomb):
    ran = run_python(sandbox, bombs.PREAMBLE + getattr(bombs, bomb))
    assert ran.stopped == "disk" or int(ran.output.split()[1]) <= LIMITS.files


@pytest.mark.parametrize("bomb", ["MANY_PROCESSES_WITH_MEMORY", "HIDDEN_PROCESSES_WITH_MEMORY"])
def test_the_memory_of_all_processes_together_is_limited(sandbox, bomb):
    ran = run_python(sandbox, bombs.PREAMBLE + getattr(bombs, bomb))
    assert ran.stopped == "memory"
    assert ran.output.count("child") < 10


def test_memory_that_processes_share_counts_once(sandbox):
    code = """
import os, time
held = bytearray(100 * 2**20)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
for _ in range(5):
    os.wait()
print("done")
"""
    assert run_python(sandbox, code).output == "done\n"


def test_a_fork_bomb_is_limited(sandbox):
    assert got(sandbox, bombs.PROCESSES) < LIMITS.processes
    assert sandbox.run(["sh", "-c", "echo alive | cat"]).output == "alive\n"


def test_the_first_process_cannot_be_harmed(sandbox):
    ran = run_python(
        sandbox,
        """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
    try:
        os.kill(1, number)
    except OSError:
        pass
for name in ("mem", "environ", "fd/0", "fd/1", "maps"):
    try:
        open(f"/proc/1/{name}", "rb").read(1)
        print("READ", name)
    except OSError:
        pass
""",
    )
    assert ran.output == ""
    assert sandbox.run(["echo", "alive"]).output == "alive\n"


@needs_isolation
def test_it_ends_an_endless_loop_with_all_that_it_started():
    for kind in ISOLATING:
        with Sandbox(SandboxLimits(seconds=1), kind) as sandbox:
            loop = f"setsid sleep {LONG} & (setsid sh -c 'while :; do :; done' &) ; while :; do :; done"
            ran = sandbox.run(["sh", "-c", loop])
            assert ran.stopped == "time"
            assert not sleeping()
            assert sandbox.run(["echo", "alive"]).output == "alive\n"


def test_what_a_finished_command_leaves_behind_is_ended_too(sandbox):
    ran = sandbox.run(["sh", "-c", f"setsid sleep {LONG} >/dev/null 2>&1 & setsid sleep {LONG} & echo done"])
    assert ran.output == "done\n"
    assert not sleeping()


@pytest.mark.parametrize("kind", [*ISOLATING, "none"])
def test_it_ends_when_the_process_that_made_it_is_killed(kind, open_folder):
    code = f"""
import sys, tempfile
tempfile.tempdir = {str(open_folder)!r}
from palestra.envs.sandbox import Sandbox
sandbox = Sandbox(isolation={kind!r})
sandbox.run(["true"])
print("started", flush=True)
sandbox.run(["sh", "-c", "setsid sleep {LONG} & sleep {LONG}"])
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    trainer.stdout.readline()
    wait_until(lambda: sleeping() == 2)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: not sleeping())
    wait_until(lambda: not list(open_folder.iterdir()))


def test_it_refuses_to_read_our_environment_variables(sandbox, monkeypatch):
    monkeypatch.setenv("MY_SECRET_KEY", "sesame")
    ran = sandbox.run(
        ["sh", "-c", f"env; cat /proc/*/environ /proc/{os.getpid()}/environ 2>/dev/null | tr '\\0' '\\n'"]
    )
    assert "sesame" not in ran.output
    assert "MY_SECRET_KEY" not in ran.output


def test_it_refuses_much_memory(sandbox):
    ran = run_python(sandbox, "x = bytearray(400 * 2**20)")
    assert "MemoryError" in ran.output


def test_output_is_cut_and_a_flood_is_stopped(sandbox):
    ran = sandbox.run(["sh", "-c", "yes | head -c 5000"])
    assert len(ran.output) < 2100
    assert "3000 more bytes" in ran.output
    assert sandbox.run(["yes"]).stopped == "output"


def test_it_refuses_to_change_the_system(sandbox):
    ran = sandbox.run(["sh", "-c", "touch /usr/x /x /bin/x /dev/x; mount -t tmpfs none /usr; mkdir /y; echo $?"])
    assert ran.output.strip().endswith("1")


def test_names_lead_nowhere_outside(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("sesame")
    sandbox.run(["sh", "-c", f"ln -s {secret} link; ln -s {tmp_path} folder; mkfifo pipe; mkdir place; chmod 0 place"])
    assert sandbox.read("link") is None
    assert sandbox.read("pipe") is None
    assert sandbox.read("place") is None
    assert sandbox.read("folder/secret.txt") is None
    for name in ("../x", "a/../../x", "/etc/passwd", "..", "", "a//b", "a\0b"):
        with pytest.raises(NotAllowedError, match="outside of the sandbox"):
            sandbox.read(name)
    for name in ("link", "folder/new.txt", "pipe", "place"):
        sandbox.write(name, "mine")
    assert sandbox.run(["cat", "link", "folder/new.txt", "pipe", "place"]).output == "mine" * 4
    assert secret.read_text() == "sesame"
    assert [path.name for path in tmp_path.iterdir()] == ["secret.txt"]


def test_closing_ends_a_command_that_another_thread_waits_for(sandbox):
    results = []
    thread = threading.Thread(target=lambda: results.append(sandbox.run(["sleep", "300"])))
    sandbox.run(["true"])
    thread.start()
    time.sleep(0.2)
    sandbox.close()
    thread.join()
    assert results[0].stopped == "lost"
    assert sandbox.run(["echo", "again"]).stopped == "lost"


def test_two_sandboxes_share_nothing(sandbox):
    sandbox.write("a.txt", "first")
    with Sandbox(LIMITS, sandbox.isolation) as other:
        assert other.read("a.txt") is None
        assert "a.txt" not in other.run(["ls", "-R", "/work"]).output


def test_removal_copes_with_any_tree(tmp_path):
    """Deep, with paths that are too long, and closed to its owner."""
    script = (
        bombs.PREAMBLE
        + bombs.LONG_PATHS.replace("got < MOST", "got < 2")
        + f"os.chdir({str(tmp_path / 'tree')!r})\n"
        + bombs.CLOSED_FOLDER.replace("got < MOST", "got < 4")
        + bombs.DEEP_FOLDERS.replace("got < 5000", "got < 1900")
        + "os.mkdir('0' * 32); os.chmod('.', 0)"
    )
    (tmp_path / "tree").mkdir()
    (tmp_path / "beside").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "beside")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "tree", check=True, capture_output=True)
    assert folder_size(str(tmp_path / "tree"))[0] == float("inf")  # what cannot be measured is too much
    remove_tree(str(tmp_path / "tree"))
    assert [path.name for path in tmp_path.iterdir()] == ["beside"]


@pytest.fixture
def no_isolation(monkeypatch):
    """A machine that permits no namespaces, such as most containers."""
    monkeypatch.setattr(sandbox_module, "why_not", lambda: "no namespaces")
    sandbox_module._warn_unsandboxed.cache_clear()


PYTHON_CODE = str(Path(__file__).parents[2] / "examples" / "python_code.py")


@pytest.mark.parametrize("env", ["shell", PYTHON_CODE])
def test_without_isolation_code_is_refused_before_anything_runs(env, no_isolation):
    with pytest.raises(UnsupportedError, match=r"no namespaces.* allow_unsandboxed=true"):
        load_env(env)
    with pytest.raises(UnsupportedError, match="cannot be isolated"):
        Sandbox()


def test_unsandboxed_code_is_allowed_by_name_and_the_whole_truth_is_told_once(no_isolation, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING):
        env = load_env("shell", {"allow_unsandboxed": "true"})
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        for problem in env.problems("train")[:3]:
            env.open(problem).close()
    assert len(caplog.records) == 1
    assert "WITHOUT A SANDBOX" in caplog.text
    sandbox_module._warn_unsandboxed.cache_clear()
    choose_isolation(allow_unsandboxed=True)
    for harm in ("read, change and delete your files", "keys", "end them", "network"):
        assert harm in caplog.text


def test_limits_hold_without_isolation():
    limits = SandboxLimits(seconds=2, memory_mib=128, processes=8, disk_mib=4, files=50, output_bytes=2000)
    with Sandbox(limits, "none") as sandbox:
        assert sandbox.run(["sh", "-c", f"setsid sleep {LONG} & while :; do :; done"]).stopped == "time"
        assert not sleeping()
        assert not sandbox.run(["sh", "-c", "head -c 9000000 /dev/zero > big || { rm big; exit 1; }"]).ok
        assert (
            sandbox.run(["sh", "-c", "mkdir m; cd m; for i in $(seq 99); do : > f$i; done; sleep 1"]).stopped == "disk"
        )
        sandbox.write("m", "now a file")
        assert sandbox.run(["cat", "m"]).output == "now a file"
        flood = sandbox.run(["sh", "-c", "for i in $(seq 20); do sleep 1 & done; wait"])
        assert flood.stopped == "processes" or "fork" in flood.output
        folder = sandbox.run(["pwd"]).output.strip()
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


def copy_of_the_sandbox(place: Path) -> Path:
    """The sandbox's code where every user may read it."""
    ours = Path(palestra.__file__).parent
    for file in ("__init__.py", "core/__init__.py", "core/errors.py", "core/moved.py", "envs/__init__.py"):
        (place / "palestra" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ours / file, place / "palestra" / file)
    shutil.copytree(ours / "envs" / "sandbox", place / "palestra" / "envs" / "sandbox")
    shutil.copy(Path(__file__).with_name("bombs.py"), place)
    return place


def as_nobody(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/python3", "-c", program], user=65534, group=65534, extra_groups=[], capture_output=True, text=True,
        timeout=120, check=False, cwd="/", env={"PATH": os.environ["PATH"], "MY_SECRET_KEY": "sesame"},
    )  # fmt: skip


@needs_isolation
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that all users may run")
@pytest.mark.parametrize("kind", ISOLATING)
def test_all_of_it_holds_for_an_ordinary_user_too(kind, open_folder):
    place = copy_of_the_sandbox(open_folder)
    program = f"""
import json, os, sys
sys.path.insert(0, {str(place)!r})
import bombs
from palestra.envs.sandbox import Sandbox, SandboxLimits
limits = SandboxLimits(**{LIMITS.__dict__!r})
seen = {{}}
with Sandbox(limits, {kind!r}) as sandbox:
    def bomb(name):
        sandbox.write("attack.py", bombs.PREAMBLE + getattr(bombs, name))
        ran = sandbox.run([sandbox.python, "-I", "attack.py"])
        seen[name] = ran.stopped if ran.stopped else int(ran.output.split("GOT")[1].split()[0])
    for name in {[*BOMBS, "PROCESSES"]!r}:
        bomb(name)
    seen["secrets"] = sandbox.run(["sh", "-c", "cat /etc/passwd /proc/1/environ; ls /root /home"]).output
    seen["alive"] = sandbox.run(["sh", "-c", "id -u; echo alive"]).output
for name in ("MANY_FILES", "MANY_PROCESSES_WITH_MEMORY"):
    with Sandbox(limits, {kind!r}) as sandbox:
        bomb(name)
print(json.dumps(seen))
"""
    done = as_nobody(program)
    if "could not be started" in done.stderr:
        pytest.skip(f"ordinary users get no namespaces here: {done.stderr.splitlines()[-1]}")
    seen = json.loads(done.stdout or done.stderr)
    assert {name: seen[name] for name, most in BOMBS.items() if seen[name] > most} == {}
    assert seen["PROCESSES"] < LIMITS.processes
    assert seen["MANY_FILES"] == "disk" or seen["MANY_FILES"] <= LIMITS.files
    assert seen["MANY_PROCESSES_WITH_MEMORY"] == "memory"
    assert "root:x" not in seen["secrets"]
    assert "sesame" not in seen["secrets"]
    assert seen["alive"].endswith("alive\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that all users may run")
def test_without_isolation_nothing_of_an_ordinary_users_code_outlives_its_limit(open_folder):
    program = f"""
import sys, tempfile
sys.path.insert(0, {str(copy_of_the_sandbox(open_folder))!r})
tempfile.tempdir = {str(open_folder)!r}
from palestra.envs.sandbox import Sandbox, SandboxLimits
with Sandbox(SandboxLimits(seconds=1), "none") as sandbox:
    loop = "(setsid sh -c 'setsid sleep {LONG} & sleep {LONG}' &) ; while :; do :; done"
    print(sandbox.run(["sh", "-c", loop]).stopped)
"""
    done = as_nobody(program)
    assert done.stdout == "time\n", done.stderr
    assert not sleeping()


def test_a_delegated_control_group_bounds_an_attempt(tmp_path, monkeypatch):
    """In a folder that looks like cgroup v2 delegated to us: the kernel's part is not tested here."""
    parent = tmp_path / "user.slice" / "app.slice"
    (parent / "our.scope").mkdir(parents=True)
    (parent / "cgroup.subtree_control").write_text("memory pids")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/x\n0::/user.slice/app.slice/our.scope\n")
    assert isolation.make_cgroup(LIMITS, tmp_path, own) is None  # an ordinary folder takes no processes

    def mkdir(path: Path) -> None:
        os.mkdir(path)
        (path / "cgroup.procs").touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    stale = parent / "palestra-sandbox-99999999-0"
    os.mkdir(stale)
    made = isolation.make_cgroup(LIMITS, tmp_path, own)
    assert made is not None
    assert not stale.exists()
    assert int((made.path / "memory.max").read_text()) == (256 + 8 + 32) * 2**20
    assert int((made.path / "pids.max").read_text()) == 24
    assert subprocess.run([*made.enter(), "echo", "hello"], capture_output=True, check=True).stdout == b"hello\n"
    assert (made.path / "cgroup.procs").read_text().strip().isdigit()
    own.write_text("0::/somewhere/else\n")
    assert isolation.make_cgroup(LIMITS, tmp_path, own) is None


def test_a_sandbox_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(sandbox_module, "PYTHON", "/nowhere/python3")
    with (
        Sandbox(LIMITS, "namespaces") as sandbox,
        pytest.raises(ServiceError, match=r"could not be started: .*nowhere"),
    ):
        sandbox.run(["true"])
