"""What the sandbox refuses. Every attack here is bounded, so that it is harmless even where it should succeed."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError
from palestra.envs.isolation import CLEAN_ENVIRONMENT, PYTHON, best_isolation, works, wrap
from palestra.envs.sandbox import Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=6, memory_mib=256, processes=16, file_mib=2, disk_mib=8, files=200, output_bytes=2000)
SHUT_IN = [kind for kind in ("bubblewrap", "namespaces") if sys.platform == "linux" and works(kind)]  # type: ignore[arg-type]
needs_isolation = pytest.mark.skipif(not SHUT_IN, reason="this machine permits no namespaces")


@pytest.fixture(params=SHUT_IN or [pytest.param("limits", marks=needs_isolation)])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, request.param) as made:
        yield made


def run_python(sandbox: Sandbox, code: str):
    sandbox.write("attack.py", code)
    return sandbox.run([PYTHON, "-I", "attack.py"])


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


def test_it_refuses_a_fork_bomb(sandbox):
    code = """
import os, time
made = 0
try:
    for _ in range(200):          # a bounded bomb
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        made += 1
except OSError:
    print("refused after", made)
"""
    ran = run_python(sandbox, code)
    assert "refused after" in ran.output
    assert int(ran.output.split()[-1]) < LIMITS.processes


def test_it_refuses_huge_files(sandbox):
    one = run_python(sandbox, "f = open('big', 'wb')\nfor _ in range(10240): f.write(bytes(2**20)); f.flush()")
    assert not one.ok
    assert (sandbox.folder / "big").stat().st_size <= LIMITS.file_mib * 2**20


def test_it_refuses_to_fill_the_disk_with_many_files(sandbox):
    code = """
import time
for i in range(100):
    open(f"f{i}", "wb").write(b"x" * 2**20)
    time.sleep(0.02)
"""
    ran = run_python(sandbox, code)
    assert ran.stopped == "disk"
    assert run_python(sandbox, "import os\nfor i in range(300): open(f'g{i}', 'w')").stopped == "disk"


def test_it_ends_an_endless_loop_with_all_that_it_started():
    limits = SandboxLimits(seconds=1)
    for kind in SHUT_IN:
        with Sandbox(limits, kind) as sandbox:
            began = time.monotonic()
            ran = sandbox.run(
                ["sh", "-c", "setsid sleep 77.77 & (setsid sh -c 'while :; do :; done' &) ; while :; do :; done"]
            )
            assert ran.stopped == "time"
            assert time.monotonic() - began < 5
    time.sleep(0.2)
    assert "77.77" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout


def test_what_a_finished_command_leaves_behind_is_ended_too(sandbox):
    ran = sandbox.run(["sh", "-c", "setsid sleep 66.66 >/dev/null 2>&1 & echo done"])
    assert ran.output == "done\n"
    time.sleep(0.2)
    assert "66.66" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout


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
    sandbox.run(["sh", "-c", f"ln -s {secret} link; ln -s {tmp_path} folder; mkfifo pipe"])
    assert sandbox.read("link") is None
    assert sandbox.read("pipe") is None
    for name in ("folder/secret.txt", "../x", "/etc/passwd", "..", ""):
        with pytest.raises(PalestraError, match="outside of the sandbox"):
            sandbox.read(name)
    with pytest.raises(PalestraError, match="outside of the sandbox"):
        sandbox.write("folder/new.txt", "x")
    sandbox.write("link", "mine")
    assert secret.read_text() == "sesame"


def test_two_sandboxes_share_nothing(sandbox):
    sandbox.write("a.txt", "first")
    with Sandbox(LIMITS, sandbox.isolation) as other:
        assert other.read("a.txt") is None
        assert "a.txt" not in other.run(["ls", "-R", "/work"]).output


def test_closing_deletes_even_what_was_closed_to_us(sandbox):
    sandbox.run(["sh", "-c", "mkdir -p a/b; touch a/b/c; chmod 000 a/b a"])
    sandbox.close()
    assert not sandbox.folder.exists()


def test_limits_hold_without_isolation_and_it_is_told(caplog):
    with caplog.at_level(logging.WARNING), Sandbox(SandboxLimits(seconds=1, file_mib=1), "limits") as sandbox:
        assert "neither bubblewrap nor namespaces" in caplog.text
        assert sandbox.run(["sh", "-c", "while :; do :; done"]).stopped == "time"
        assert not sandbox.run(["sh", "-c", "head -c 3000000 /dev/zero > big"]).ok
        assert "HOME=" in sandbox.run(["env"]).output


@needs_isolation
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("kind", SHUT_IN)
def test_a_user_without_rights_is_shut_in_too(kind, monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    script = "id -u; touch ok; ls; ls /root /home /tmp/* 2>/dev/null; for i in $(seq 17); do sleep 0.3 & done"
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 65534, 65534)
        command = wrap(["sh", "-c", script], Path(folder), LIMITS, kind, None)
        done = subprocess.run(
            command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=20, check=False,
            cwd=folder, env=CLEAN_ENVIRONMENT,
        )  # fmt: skip
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr.split("\n")[0]:
        pytest.skip("plain users get no namespaces here")
    assert done.stdout.split()[1:] == ["ok"]
    assert "fork" in done.stderr


def test_the_strongest_isolation_is_taken():
    assert best_isolation() == [*SHUT_IN, "limits"][0]
