"""One run on the wire, each of its four processes killed in turn: nothing stays, nothing is lost, it comes to its end.

All twelve cases, each with a run of its own: benchmarks/run_kills.py.
"""

import runpy
from pathlib import Path

import pytest

from palestra.models.loading import load_model

kills = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "run_kills.py"))
STEPS = 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_one_after_the_other_is_resumed_to_its_end(tmp_path):
    run = kills["Victims"](tmp_path, STEPS)
    kept: dict[int, object] = {}
    cases = [("env", "start-up", "the environment was killed"), ("api", "step", "the trajectory API was killed")]
    cases += [("trainer", "checkpoint", "the trainer was killed"), ("supervisor", "step", "its supervisor has died")]
    for victim, moment, reason in cases:
        run.kill_at(victim, moment)
        told_s, gone_s = run.wait_until_nobody_is_left()
        assert told_s < 10
        assert gone_s < (10 if victim == "supervisor" else 45)
        state = run.wait_until_ended()
        assert state.state == "failed"
        assert reason in state.reason
        now = kills["recorded"](run.folder)
        assert {step: now[step] for step in kept} == kept
        kept = now
        run.manager.resume(run.run_id)
    end = run.wait_until_ended()
    assert end.state == "completed", end.reason
    final = kills["recorded"](run.folder)
    assert sorted(final) == list(range(1, STEPS + 1))
    assert {step: final[step] for step in kept} == kept
    results = run.manager.results(run.run_id)
    assert results["final_metrics"]["step"] == STEPS

    assert load_model(results["model_path"]).model.num_parameters() > 0
