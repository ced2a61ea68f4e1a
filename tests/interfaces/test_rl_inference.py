"""rl_test_inference: several models side by side; one that hangs keeps nobody else's result."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import wait_until
from served import json_app
from starlette.responses import Response

from palestra.core.errors import NotAllowedError
from palestra.extras.agent_tools import RlTools, inference
from palestra.extras.agent_tools.inference import OPENROUTER, OPENROUTER_MODELS, choose_models
from palestra.extras.agent_tools.locks import Inference, RequestLimits, Site
from palestra.extras.atropos.atropos import venv_folder
from palestra.runs.manager import RunManager

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent

VENV = venv_folder()
KEY = "sk-endpoint-0123456789"
TELLTALE = """
import os, sys
print(dict(os.environ), file=sys.stderr)
try:
    print("LOOKED INTO ITS PARENT", open(f"/proc/{os.getppid()}/environ", "rb").read(), file=sys.stderr)
except OSError:
    pass
"""


ASKED = Counter()  # requests by model


async def complete(request):
    """`good` says the number that it is asked for; `stuck` is wrong twice, then hangs."""
    body = await request.json()
    model = body["model"]
    ASKED[model] += 1
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return Response(status_code=401)
    if model == "stuck" and ASKED[model] > 2:
        await asyncio.sleep(120)
    text = body["messages"][-1]["content"].removeprefix("Say ").rstrip(".") if model == "good" else "no"
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "cost": 0.001},
    }


@pytest.fixture
def url(serve):
    ASKED.clear()
    return serve(json_app(complete), grace_s=0) + "/v1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rl_agent.make_site(tmp_path)
    path = tmp_path / "environments" / "echo_number.py"
    path.write_text(TELLTALE + path.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_API_KEY", rl_agent.PLANTED)
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    return tmp_path


@pytest.fixture
def clock(monkeypatch):
    """The clock of the tests jumps an hour when `stuck` hangs and the process of `good` has ended for a second."""
    ended: list[float] = []

    def monotonic() -> float:
        now = time.monotonic()
        if not ended and ASKED["stuck"] > 2 and not processes_with("0-good.jsonl"):
            ended.append(now)
        return now + 3600.0 * bool(ended and now > ended[0] + 1.0)

    stand_in = SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(inference, "time", stand_in)


def test_a_model_that_times_out_keeps_its_part_and_the_other_is_whole(folder, url, clock):
    site = Site(
        limits=RequestLimits(test_minutes=10, test_requests_at_once=2),
        inference=Inference(base_url=url, api_key_env="ENDPOINT_KEY", models=["good", "stuck"]),
    )
    tools = RlTools(RunManager(folder / "home"), site)
    tools.rl_select_environment("echo-number")
    told = []
    answer = tools.call(
        "rl_test_inference", {"num_steps": 3, "group_size": 2}, progress=lambda *step: told.append(step)
    )
    good, stuck = answer["results"]
    assert (good["status"], good["steps_tested"], good["completions"], good["correct"]) == ("completed", 3, 6, 6)
    assert good["accuracy"] == good["step_success_rate"] == 1.0
    assert (good["prompt_tokens"], good["completion_tokens"]) == (60, 12)
    assert good["cost_usd"] == pytest.approx(0.006)
    assert (stuck["status"], stuck["steps_tested"], stuck["completions"]) == ("timed out", 1, 2)
    assert stuck["mean_score"] == pytest.approx(0.1)
    assert stuck["correct"] == 0  # a score above nothing is not yet correct
    assert answer["summary"]["best_model"] == "good"
    assert told[-1][:2] == (4, 6)
    assert len(Path(good["output_file"]).read_text().splitlines()) == 3
    assert "'PATH'" in Path(good["log_file"]).read_text()  # it told all that it saw,
    if sys.platform == "linux":
        assert "LOOKED INTO" not in Path(good["log_file"]).read_text()
    for path in (folder / "home").rglob("*"):  # and saw neither key
        text = path.read_text(errors="replace") if path.is_file() else ""
        assert KEY not in text, path
        assert rl_agent.PLANTED not in text, path


def test_a_failing_model_says_why(folder, url):
    site = Site(inference=Inference(base_url=url, api_key_env="NO_SUCH_KEY"))
    tools = RlTools(RunManager(folder / "home"), site)
    tools.rl_select_environment("echo-number")
    (row,) = tools.call("rl_test_inference", {"num_steps": 1, "group_size": 2, "models": ["good"]})["results"]
    assert row["status"] == "failed"
    assert "401" in row["error"]
    assert row["completions"] == 0


@pytest.mark.skipif(not (VENV / "ready.json").exists(), reason=f"atroposlib is not installed in {VENV}")
@pytest.mark.parametrize("in_a_list", [True, False])
def test_an_atropos_environment_that_uses_managed_server_is_tested(folder, serve, in_a_list):
    async def digits(request):
        body = await request.json()
        choice = {"message": {"role": "assistant", "content": "1" * 20}, "finish_reason": "stop"}
        choices = [{"index": i, **choice} for i in range(body.get("n", 1))]
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}

    text = (Path(__file__).parents[2] / "benchmarks" / "atropos" / "digits_env.py").read_text()
    # all answers are equal here
    text = text.replace("max_token_length=256", "max_token_length=256, ensure_scores_are_not_same=False")
    (folder / "environments" / "digits.py").write_text(text if in_a_list else text.replace("[server]", "server"))
    site = Site(inference=Inference(base_url=serve(json_app(digits), grace_s=0) + "/v1", models=["m"]))
    tools = RlTools(RunManager(folder / "home"), site)
    assert "error" not in tools.rl_select_environment("digits")
    (row,) = tools.rl_test_inference(num_steps=2, group_size=3)["results"]
    assert row["status"] == "completed", row
    assert (row["steps_tested"], row["completions"], row["correct"]) == (2, 6, 6)


def test_a_test_that_nobody_wants_any_more_ends_at_once(folder):
    tools = RlTools(RunManager(folder / "home"), Site())
    tools.rl_select_environment("echo-number")
    gone = threading.Event()
    threading.Timer(1.0, gone.set).start()
    answer = tools.call("rl_test_inference", {"models": ["palestra/tiny"]}, cancelled=gone)
    assert answer["results"][0]["status"] == "cancelled"
    assert not processes_with(answer["results"][0]["output_file"])


def test_what_it_started_ends_with_it_also_by_kill(folder):
    code = (
        "from palestra.extras.agent_tools import RlTools; t = RlTools(); t.rl_select_environment('echo-number'); "
        "t.rl_test_inference(models=['palestra/tiny'])"
    )
    environment = os.environ | {"PALESTRA_HOME": str(folder / "home")}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    logs = lambda: list((folder / "home").glob("inference_tests/*/*.log"))  # noqa: E731
    name = str(wait_until(logs, 60.0)[0].with_suffix(".jsonl"))
    wait_until(lambda: processes_with(name), 60.0)
    parent.kill()
    parent.wait()
    wait_until(lambda: not processes_with(name), 60.0)


def processes_with(word: str) -> list[str]:
    """The processes that have this word on their command line."""
    listing = subprocess.run(["ps", "-eo", "pid,args", "-ww"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if word in line]


REFUSED = [
    ({"num_steps": 100_000}, "2048"),
    ({"num_steps": 10**30}, "this site allows"),
    ({"num_steps": 0}, "at least 1 problem"),
    ({"group_size": 1}, "2 attempts"),
    ({"num_steps": "3"}, "valid integer"),
    ({"models": ["a"] * 2}, "twice"),
    ({"models": [f"m{i}" for i in range(50)]}, "at most 16"),
    ({"models": ["somewhere/else"]}, "OPENROUTER_API_KEY"),
    ({"models": ["m@http://10.0.0.1/v1"]}, "this machine"),
    ({"models": ["m@https://127.0.0.1.evil.example/v1"]}, "this machine"),
    ({"models": [""]}, "not the name of a model"),
]


def test_what_is_too_much_or_nowhere_is_refused(folder, monkeypatch):
    for name in ("OPENROUTER_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    tools = RlTools(RunManager(folder / "home"), Site())
    assert "rl_select_environment" in tools.call("rl_test_inference", {})["error"]
    tools._pending = rl_agent.pending()
    for arguments, words in REFUSED:
        assert words in tools.call("rl_test_inference", arguments)["error"], arguments


def test_the_models_are_those_that_the_keys_and_the_site_suggest():
    openrouter = choose_models(None, Site(), "palestra/tiny", {"OPENROUTER_API_KEY": "k"})
    assert [m.name for m in openrouter] == list(OPENROUTER_MODELS)
    assert {(m.base_url, m.api_key_env) for m in openrouter} == {(OPENROUTER, "OPENROUTER_API_KEY")}
    (local,) = choose_models(None, Site(), "palestra/tiny", {})
    assert (local.name, local.base_url) == ("palestra/tiny", None)
    (own,) = choose_models(["m"], Site(), "palestra/tiny", {"OPENAI_BASE_URL": "http://box:1/v1"})
    assert (own.base_url, own.api_key_env) == ("http://box:1/v1", "OPENAI_API_KEY")
    (near,) = choose_models(["a/b@http://localhost:8000/v1"], Site(), "palestra/tiny", {"OPENROUTER_API_KEY": "k"})
    assert (near.name, near.base_url, near.api_key_env) == ("a/b", "http://localhost:8000/v1", None)
    with pytest.raises(NotAllowedError):
        choose_models(["m@http://box/v1"], Site(), "palestra/tiny", {})


@pytest.mark.slow
def test_a_local_model_is_tested_too(folder):
    tools = RlTools(RunManager(folder / "home"), Site())
    tools.rl_select_environment("echo-number")
    (row,) = tools.call("rl_test_inference", {"num_steps": 1, "group_size": 2, "models": ["palestra/tiny"]})["results"]
    assert (row["status"], row["completions"], row["cost_usd"]) == ("completed", 2, 0.0)
    assert row["completion_tokens"] > 0
