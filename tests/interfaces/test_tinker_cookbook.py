"""A recipe of the Tinker cookbook as it is, in the environment that `make test-tinker` uses too."""

import json
import os
import sys
from pathlib import Path

import pytest
from forkserver import Forkserver

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from tinker_recipes import COOKBOOK, cookbook

MAIN = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("tinker_cookbook.recipes.math_rl.train", run_name="__main__", alter_sys=True)
"""


def test_math_rl_trains_two_steps_on_our_server(tmp_path: Path, forkserver: Forkserver) -> None:
    pytest.importorskip("tinker")
    from tinker_server import first_layer, tinker_server

    python = cookbook()
    if python is None:
        pytest.skip(f"{COOKBOOK} cannot be installed here: no registry")
    base = first_layer()
    with tinker_server([base], tmp_path / "server") as running:
        recipe = (
            "env=arithmetic renderer_name=role_colon groups_per_batch=2 "
            f"group_size=4 max_steps=2 lora_rank=4 save_every=0 eval_every=0 model_name={base.path} "
            f"base_url={running.url} log_path=log"
        )
        environment = {**os.environ, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        (packages,) = python.parents[1].glob("lib/*/site-packages")
        ended = forkserver.run("-c", MAIN, str(packages), *recipe.split(), cwd=tmp_path, env=environment, timeout=300)
        assert ended.returncode == 0, ended.stderr[-2000:]
        assert "Training completed successfully" in ended.stdout + ended.stderr
        steps = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").open()]
        assert [row["env/all/total_episodes"] for row in steps if "env/all/correct" in row] == [8, 8]
        assert len(set(running.service.checkpoints.run_ids())) == 1
