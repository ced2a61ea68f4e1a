"""The trajectory API under load and under kill -9: nothing accepted is lost, nothing comes twice."""

import runpy
from pathlib import Path

run = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "trajectory_load.py"))["run"]


def test_fifty_clients_at_once_lose_nothing_and_nothing_comes_twice(tmp_path):
    result = run(clients=50, groups=8, kills=0, folder=tmp_path)
    assert result["delivered"] == result["groups"] == 400
    assert (result["lost"], result["twice"]) == (0, 0)


def test_server_killed_in_the_middle_loses_nothing_that_it_accepted(tmp_path):
    result = run(clients=20, groups=12, kills=2, folder=tmp_path)
    assert result["delivered"] == result["groups"] == 240
    assert (result["lost"], result["twice"]) == (0, 0)
