"""Training from a script with a main guard, in a process whose children are spawned."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, json, os, sys, urllib.request

multiprocessing.set_start_method("spawn")
import palestra
from palestra.agents.programs import function_agent
from palestra.demo import suite

secret = object()  # of __main__, and nothing that could be pickled


def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    assert secret is not None
    return a + b


def rewarded(ctx):
    return float(secret is not None and len(ctx.final_assistant_message.text) % 2)


def program(case, base_url, api_key):
    body = {"model": "m", "messages": [{"role": "user", "content": case["input"]}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    kind = sys.argv[1]
    settings = {
        "rollout.group_size": 2, "train.problems_per_step": 2, "train.max_steps": 2, "rollout.max_new_tokens": 16,
        "eval.cases": 2, "checkpoint.every": 0, "output_dir": "runs", "train.filter_equal_groups": False,
    }
    agent = palestra.Agent("adder", "palestra/tiny", instructions="Add.", tools=[add])
    if kind == "workers":
        settings["rollout.workers"] = 2
    elif kind == "gateway workers":
        settings["agent.gateway_workers"], agent = 2, function_agent(program)
    else:  # a platform without forks, and a run that would choose workers by itself
        import torch
        from palestra.envs.suite_env import SuiteEnvironment
        from palestra.train import tasks

        tasks.CAN_FORK, tasks.processors = False, lambda: 8
        tasks.device_named = lambda name: torch.device("cuda")
        SuiteEnvironment.works_in_forks = True
    result = palestra.train_grpo(agent, suite, [rewarded], config=settings, progress=False)
    print("steps", len(result.metrics))
"""


@pytest.mark.parametrize("kind", ["workers", "gateway workers", "no forks"])
def test_a_script_with_a_main_guard_trains_where_children_are_spawned(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", kind]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "steps 2" in ended.stdout
    said = ended.stderr.count("rollouts run in this process")
    assert said == (1 if kind == "no forks" else 0)
