"""The trajectory API under load and under kill -9: nothing accepted is lost, nothing comes twice."""

import runpy
from pathlib import Path

import pytest

run = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "trajectory_load.py"))["run"]


@pytest.mark.parametrize(("clients", "groups", "kills"), [(50, 8, 0), (20, 12, 2)], ids=["load", "killed"])
def test_nothing_that_was_accepted_is_lost_and_nothing_comes_twice(tmp_path, clients, groups, kills):
    result = run(clients=clients, groups=groups, kills=kills, folder=tmp_path)
    assert result["delivered"] == result["groups"] == clients * groups
    assert (result["lost"], result["twice"]) == (0, 0)
