"""A trainer that is asked to end finishes its step, however long steps take."""

import json

import pytest

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs.supervisor import Supervisor


@pytest.mark.parametrize(
    ("train_seconds", "patience_s"), [([], 120.0), ([2.0, 3.0], 39.0), ([100.0, 20.0], 330.0), ([1e6], 600.0)]
)
def test_a_trainer_has_as_long_as_three_of_its_steps(tmp_path, train_seconds, patience_s):
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._folder = RunFolder.create(tmp_path, "run", RunConfig(), {}, at=tmp_path / "run")
    rows = [{"step": i, "train_seconds": seconds} for i, seconds in enumerate(train_seconds)]
    supervisor._folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert supervisor._patience_s("trainer") == patience_s
    assert supervisor._patience_s("env") == 10.0
