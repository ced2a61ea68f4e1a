"""The environment that the documentation begins with is learned, through the command line."""

import json
from pathlib import Path

import pytest

from palestra.cli.main import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_first_env.py"


@pytest.mark.slow("make test-slow trains every example")
def test_the_first_environment_is_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--env", str(EXAMPLE), "--train.max_steps", "7", "--env.held_out_size", "40", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["held_out_after"] > result["held_out_before"] + 0.3
