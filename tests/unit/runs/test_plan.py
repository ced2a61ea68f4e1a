"""What a run's processes are started with."""

from pathlib import Path

from palestra.core.config import RunConfig
from palestra.core.yaml_config import load_yaml
from palestra.runs.plan import _env_settings
from palestra.runs.request import RunRequest
from palestra.runs.store import RunFolder


def test_an_environment_that_counts_steps_counts_those_of_a_run_that_was_made_longer(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run", RunConfig.build({"train": {"max_steps": 100}}), {})
    request = RunRequest(environment="their_env.py", env_settings={"total_steps": 100, "level": 2})
    assert load_yaml(_env_settings(request, run.path))["env"] == {"total_steps": 100, "level": 2}
    run.lengthen(200)
    assert load_yaml(_env_settings(request, run.path))["env"] == {"total_steps": 200, "level": 2}
