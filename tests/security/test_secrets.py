"""Code of others gets at no key, and what is written down holds none."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
from served import json_app
from starlette.responses import RedirectResponse

from palestra.core import children
from palestra.core.config import RunConfig
from palestra.core.errors import ServiceError
from palestra.core.files import open_private
from palestra.core.http import Request
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import clean_environment, redact
from palestra.envs.discover import in_file
from palestra.envs.load import describe_env
from palestra.extras.agent_tools import RlTools
from palestra.extras.agent_tools.answers import answer
from palestra.extras.agent_tools.mcp_server import KINDS, read_resource
from palestra.extras.atropos.atropos import command as atropos_command
from palestra.extras.atropos.atropos import serve_command
from palestra.runs.index import Index
from palestra.runs.manager import RunManager
from palestra.runs.processes import write_log

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc and namespaces are Linux's")
NASTY = 'pä"ss\\wörd-42'

THIEF = """
import glob, sys
from pathlib import Path
from palestra import Env

def environs():
    for name in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/task/*/environ"):
        try:
            yield Path(name).read_bytes()
        except OSError:
            pass

found = [text for text in environs() if b"sk-server-secret-42424242" in text]
if found:
    raise SystemExit("stolen")


class Thief(Env):
    name = "thief"

    def make_problem(self, rng):
        return "?", 1
"""


@LINUX
def test_an_environment_whose_config_is_read_finds_no_key_in_any_process(tmp_path, monkeypatch):
    (tmp_path / "thief.py").write_text(THIEF)
    holder = [sys.executable, "-c", "print(flush=True); input()"]
    environ = {**os.environ, "OPENAI_API_KEY": "sk-server-secret-42424242"}
    with subprocess.Popen(holder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        (found,) = in_file(tmp_path / "thief.py")
        described = describe_env(found)  # raises "stolen" where it could read the other's environment
        server.kill()
    assert described.fields


@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
@pytest.mark.parametrize("uid", [0, 65534])
def test_an_isolated_child_reads_no_environment_and_keeps_its_user(uid):
    """Also as an ordinary user, with the system's Python: ours may lie in a folder that only root may enter."""
    folder = Path(tempfile.mkdtemp())  # pytest's own is root's alone
    folder.chmod(0o755)
    launcher, code = folder / "isolated_child.py", folder / "code.py"
    launcher.write_text(Path(children.isolated()[2]).read_text())
    code.write_text(
        "import os\n"
        "try: open(f'/proc/{os.getppid()}/environ').read(); print('read')\n"
        "except OSError: print('refused', os.geteuid())\n"
    )
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()), None)
    if python is None:
        pytest.skip("no Python that every user may run")
    words = ["setpriv", f"--reuid={uid}", "--clear-groups", "sh", "-c", f"{python} {launcher} {code}; true"]
    environ = {"PATH": os.environ["PATH"], "MY_KEY": "sk-0123456789"}
    said = subprocess.run(words, env=environ, capture_output=True, text=True, cwd="/")
    shutil.rmtree(folder)
    assert said.stdout == f"refused {uid}\n", said.stderr


def test_a_file_written_for_atropos_is_started_as_an_isolated_child(tmp_path):
    """What one of those can see is shown above and below."""
    python = Path("/venv/bin/python")
    for command in (
        serve_command(python, tmp_path / "a.py", {}, {}),
        atropos_command(python, tmp_path / "a.py", "process"),
    ):
        assert command[:3] == children.isolated(python=python)


def test_code_of_others_imports_nothing_from_the_folder_of_the_server(tmp_path):
    (tmp_path / "planted.py").write_text("")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").write_text("import planted")
    said = subprocess.run(children.isolated("code/main.py"), cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'planted'" in said.stderr


@LINUX
@pytest.mark.parametrize(("keys", "is_open"), [({"MY_API_KEY": "sk-0123456789"}, False), ({}, True)])
def test_a_process_with_keys_cannot_be_looked_into_by_others_of_its_user(keys, is_open):
    code = (
        "import os; from palestra.core.secrets import hide_environment; hide_environment(); "
        "print(os.stat('/proc/self/environ').st_uid, os.geteuid()); "
        "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    said = subprocess.run([sys.executable, "-c", code], env={**environ, **keys}, capture_output=True, text=True)
    assert said.stdout.split()[2] == str(int(is_open)), said.stderr


def test_the_commands_hide_their_environment(monkeypatch):
    from palestra.cli import main
    from palestra.core import secrets

    hidden = []
    monkeypatch.setattr(secrets, "hide_environment", lambda: hidden.append(True))
    monkeypatch.setattr(sys, "argv", ["palestra", "version", "--help"])
    with pytest.raises(SystemExit):
        main.main()
    assert hidden


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps on this machine")
@pytest.mark.parametrize("words", [["--token", "open-sesame"], ["--token=open-sesame"]])
def test_the_token_of_a_server_is_not_among_its_arguments(tmp_path, words):
    command = [sys.executable, "-m", "palestra", "trajectory", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        url = server.stdout.readline().split()[-1]  # it answers now
        shown = subprocess.run(["ps", "-o", "args=", "-p", str(server.pid)], capture_output=True, text=True, check=True)
        statuses = [
            httpx.get(f"{url}/status", headers={"Authorization": f"Bearer {token}"}, trust_env=False).status_code
            for token in ("open-sesame", "another")
        ]
        server.terminate()
    assert "trajectory --port 0" in shown.stdout
    assert "open-sesame" not in shown.stdout
    assert statuses[0] != 401 == statuses[1]


def test_a_password_inside_a_url_is_replaced_and_not_passed_on():
    environ = {
        "DATABASE_URL": "postgres://u:PASSWORD-1@db/x",
        "HTTPS_PROXY": "http://user:pw@proxy:8080",
        "HTTP_PROXY": "http://proxy:8080",
    }
    text = "cannot reach postgres://u:PASSWORD-1@db/x (PASSWORD-1) by http://user:pw@proxy:8080; pw is a word"
    assert redact(text, environ) == (
        "cannot reach postgres://u:[DATABASE_URL]@db/x ([DATABASE_URL]) by http://user:[HTTPS_PROXY]@proxy:8080; "
        "pw is a word"
    )
    assert clean_environment(environ=environ) == {"HTTP_PROXY": "http://proxy:8080"}
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nAQEFAASCBKcwggSjAgEAAoIB"  # each of its lines is a secret
    assert redact("a\nAQEFAASCBKcwggSjAgEAAoIB\nb", {"SSH_KEY": key}) == "a\n[SSH_KEY]\nb"


@pytest.mark.parametrize(
    "written",
    [NASTY, json.dumps(NASTY), json.dumps(NASTY, ensure_ascii=False), repr(NASTY), "p%C3%A4%22ss%5Cw%C3%B6rd-42"],
)
def test_a_secret_is_replaced_also_where_it_is_escaped(written):
    text = redact(f"it is {written}.", {"MY_SECRET": NASTY})
    assert "[MY_SECRET]" in text
    assert "rd-42" not in text


def test_an_answer_of_a_tool_holds_no_escaped_secret(monkeypatch):
    monkeypatch.setenv("MY_SECRET", NASTY)
    told = answer(lambda: {"error": f"401 for {NASTY}", NASTY: [NASTY]})
    assert told == {"error": "401 for [MY_SECRET]", "[MY_SECRET]": ["[MY_SECRET]"]}


@pytest.mark.parametrize("kind", ["report", "metrics", "rollouts", "log"])
def test_what_an_agent_reads_of_a_run_holds_no_secret(kind, tmp_path, monkeypatch):
    assert kind in KINDS
    home, row = tmp_path / "home", json.dumps({"step": 1, "note": "it is sk-0123456789"}) + "\n"
    folder = RunFolder.create(tmp_path, "run", RunConfig(), {}, at=tmp_path / "run")
    folder.logs.mkdir()
    for path in (folder.report_file, folder.metrics_file, folder.rollouts_file, folder.log_file("trainer")):
        path.write_text(row)
    about = {"run_id": "abcd", "name": "n", "environment": "e", "folder": str(folder.path), "host": "h"}
    Index(home).add(**about, kind="managed", state="completed", created=1.0, launched=1.0)
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    _, text = read_resource(RlTools(RunManager(home)), "abcd", kind)
    assert "it is [MY_API_KEY]" in text
    assert "sk-0123456789" not in text


def test_redacting_a_line_does_not_look_at_the_whole_environment_again():
    from palestra.core import secrets

    environ = {f"NAME_{i}_KEY": f"secret-number-{i}" for i in range(50)}
    redact("x", environ)
    before = secrets._secrets.cache_info().misses
    for i in range(100):
        redact(f"line {i}", environ)
    assert secrets._secrets.cache_info().misses == before


def test_logs_are_for_their_owner_alone(tmp_path):
    os.umask(0o022)
    with open_private(tmp_path / "logs" / "trainer.log") as log:
        log.write(b"text")
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "logs" / "trainer.log").stat().st_mode) == 0o600


def written_log(path: Path, environ: dict[str, str], parts: Iterable[bytes]) -> bytes:
    reads, writes = os.pipe()
    thread = threading.Thread(target=write_log, args=(reads, path, environ))
    thread.start()
    for part in parts:
        os.write(writes, part)
    os.close(writes)
    thread.join(10)
    os.close(reads)
    return path.read_bytes()


def test_a_log_is_redacted_while_it_is_written_also_a_secret_that_comes_in_two_parts(tmp_path):
    parts = (b"one sk-01234", b"56789\ntwo \xff", b" sk-0123456789")
    written = written_log(tmp_path / "log", {"MY_API_KEY": "sk-0123456789"}, parts)
    assert written == b"one [MY_API_KEY]\ntwo \xff [MY_API_KEY]"


def test_the_log_of_a_process_holds_no_secret_that_only_this_process_has(tmp_path):
    """Such as the token of a run's own servers, which is made when the run is launched."""
    code = f"""
import os
from pathlib import Path
from palestra.runs.processes import spawn
words = ["/bin/sh", "-c", "echo it is $PALESTRA_TOKEN and $MY_API_KEY"]
environ = {{"PALESTRA_TOKEN": "run-0123456789", **os.environ}}
spawn(words, Path({str(tmp_path / "log")!r}), environ, Path("/")).log_writer.join()
"""
    environ = {**os.environ, "MY_API_KEY": "sk-0123456789"}
    environ.pop("PALESTRA_TOKEN", None)
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    assert (tmp_path / "log").read_text() == "it is [PALESTRA_TOKEN] and [MY_API_KEY]\n"


def test_a_redirect_carries_no_key(serve):
    seen = []

    async def redirect(request):
        if request.method == "GET":
            seen.append(request.headers.get("Authorization"))
        return RedirectResponse(f"http://localhost:{request.url.port}/elsewhere", 302)

    url = f"{serve(json_app(redirect))}/v1/chat/completions"
    request = Request(url, {"model": "m"}, token="sk-0123456789")
    with pytest.raises(ServiceError, match="not followed with a key"):
        request.parse(request.send())
    assert Request(url, token="sk-0123456789").send().status == 302
    assert seen == ["Bearer sk-0123456789"]  # of the URL that it was meant for
