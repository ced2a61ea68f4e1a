"""Agents that are programs: what they see, where they end, and what is kept of them."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import has_ended

from palestra.agents.programs import Endpoint, ProgramLimits, command_agent, function_agent
from palestra.core.errors import InputError, RolloutError

ENDPOINT = Endpoint("http://127.0.0.1:9/attempt/a1/v1", "key-of-a1")
CASE = {"id": "c-0", "input": "2 + 2? 日本 \u2028"}


def attempts(agent, limits: ProgramLimits, runs: int = 1):
    async def some():
        return await asyncio.gather(*(agent.run(CASE, ENDPOINT, limits) for _ in range(runs)))

    return asyncio.run(some())


def ran(code: str, limits: ProgramLimits | None = None, **options):
    agent = command_agent([sys.executable, "-IS", "-c", code], **options)
    return attempts(agent, limits or ProgramLimits(timeout_s=20))[0]


def write_pid(note: Path, seconds: int = 60) -> str:
    """A program that writes its number down and then sleeps."""
    return f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep({seconds})"


def test_the_case_is_on_stdin_and_in_a_file_and_the_result_file_is_read() -> None:
    code = """
import json, os, sys
case = json.load(sys.stdin)
assert case == json.load(open(os.environ["PALESTRA_CASE_FILE"], encoding="utf-8"))
json.dump({"answer": case["input"]}, open(os.environ["PALESTRA_RESULT_FILE"], "w"))
print("out"); print("err", file=sys.stderr); sys.exit(3)
"""
    ended = ran(code)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (3, "out\n", "err\n")
    assert ended.result == {"answer": CASE["input"]}
    assert ended.failure(20, 1000) is None


def test_a_program_sees_the_attempts_urls_and_keys_and_none_of_ours(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real-one-of-ours")
    monkeypatch.setenv("WANDB_API_KEY", "another-one-of-ours")
    monkeypatch.setenv("PALESTRA_TOKEN", "token-of-our-servers")
    seen = ran("import os; print(*sorted(f'{k}={v}' for k, v in os.environ.items()), sep='\\n')", env={"MORE": "1"})
    lines = seen.stdout.splitlines()
    assert "OPENAI_BASE_URL=http://127.0.0.1:9/attempt/a1/v1" in lines
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:9/attempt/a1" in lines
    assert {"OPENAI_API_KEY=key-of-a1", "ANTHROPIC_API_KEY=key-of-a1", "MORE=1"} <= set(lines)
    assert "of-ours" not in seen.stdout
    assert "token-of-our-servers" not in seen.stdout


@pytest.mark.parametrize(("hangs", "timeout_s"), [(True, 1.0), (False, 120.0)])
def test_what_a_program_has_started_ends_with_it(tmp_path, hangs, timeout_s) -> None:
    note = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({str(note)!r}, "w").write(str(child.pid)); print("waiting", flush=True); time.sleep({300 * hangs})
"""
    ended = ran(code, ProgramLimits(timeout_s=timeout_s))
    assert (ended.stdout, ended.stopped) == ("waiting\n", "time" if hangs else None)
    if hangs:
        assert "longer than 1 s" in ended.failure(1.0, 1000)
        assert "waiting" in ended.failure(1.0, 1000)
    assert has_ended(int(note.read_text()))


def test_a_program_that_floods_its_output_or_is_killed_by_a_signal_has_failed() -> None:
    ended = ran("while True: print('x' * 1000)", ProgramLimits(timeout_s=20, max_output_bytes=50_000))
    assert ended.stopped == "output"
    assert len(ended.stdout) == 50_000
    assert "more than 50000 bytes" in ended.failure(20, 50_000)
    ended = ran("import os; os.kill(os.getpid(), 9)")
    assert ended.exit_code == -9
    assert "signal 9" in ended.failure(20, 1000)


def test_a_program_that_does_not_exist_is_told_by_its_command() -> None:
    agent = command_agent("/no/such/program --now")
    with pytest.raises(RolloutError, match="/no/such/program --now could not be started"):
        asyncio.run(agent.run(CASE, ENDPOINT, ProgramLimits()))
    with pytest.raises(InputError, match="command is empty"):
        command_agent("")


def test_cancelling_an_attempt_ends_its_process(tmp_path) -> None:
    note = tmp_path / "pid"
    agent = command_agent([sys.executable, "-IS", "-c", write_pid(note)])

    async def cancelled() -> None:
        task = asyncio.create_task(agent.run(CASE, ENDPOINT, ProgramLimits()))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancelled())
    assert has_ended(int(note.read_text()))


def test_functions_may_be_async_and_what_they_return_or_raise_is_kept() -> None:
    async def later(case, base_url, api_key):
        return case["id"], base_url, api_key

    def broken(case, base_url, api_key):
        raise ValueError("the model said nonsense")

    def slow(case, base_url, api_key):
        time.sleep(1)

    def run(function, timeout_s=5.0):
        return asyncio.run(function_agent(function).run(CASE, ENDPOINT, ProgramLimits(timeout_s)))

    assert run(later).result == ("c-0", ENDPOINT.base_url, "key-of-a1")
    assert run(broken).stderr == "ValueError: the model said nonsense"
    assert run(broken).exit_code == 1
    assert run(slow, 0.05).stopped == "time"


DAEMON = """
import os, subprocess, sys, time
note, kind, hangs = sys.argv[1:]
if kind == "exec":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    open(note, "w").write(str(child.pid))
elif kind == "empty environment":
    subprocess.run(["sh", "-c", f"env -i setsid sh -c 'echo $$ > {note}; exec sleep 600' >/dev/null 2>&1 &"])
else:  # a fork that never becomes another program, and whose parent ends
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(note, "w").write(str(os.getpid()))
            os.close(1), os.close(2)
            time.sleep(600)
        os._exit(0)
    os.wait()
while not (os.path.exists(note) and open(note).read()):
    time.sleep(0.01)
if hangs == "hangs":
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
@pytest.mark.parametrize(
    ("kind", "hangs"),
    [("exec", "ends"), ("empty environment", "ends"), ("empty environment", "hangs"), ("fork", "hangs")],
)
def test_a_process_in_a_session_of_its_own_ends_with_its_attempt(tmp_path, kind, hangs) -> None:
    program, note = tmp_path / "agent.py", tmp_path / "pid"
    program.write_text(DAEMON)
    agent = command_agent([sys.executable, str(program), str(note), kind, hangs])
    timeout_s = 2.0 if hangs == "hangs" else 60.0
    (ended,) = attempts(agent, ProgramLimits(timeout_s=timeout_s))
    assert (ended.stopped == "time") == (hangs == "hangs"), ended
    assert has_ended(int(note.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
def test_an_attempt_ends_with_a_trainer_that_is_killed(tmp_path) -> None:
    note = tmp_path / "pid"
    trainer = f"""
import asyncio, sys
from palestra.agents.programs import Endpoint, ProgramLimits, command_agent
agent = command_agent([sys.executable, "-IS", "-c", {write_pid(note, 600)!r}])
asyncio.run(agent.run({{}}, Endpoint("http://127.0.0.1:9/v1", "key"), ProgramLimits()))
"""
    process = subprocess.Popen([sys.executable, "-c", trainer])
    while not (note.exists() and note.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert has_ended(int(note.read_text()))
