"""Calibration: measured seconds become the efficiencies by which the plan would have been right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.plan.calibration import MeasuredStep, calibrated, calibration_file, efficiency_of, save_calibration
from palestra.plan.device import DEVICES, GPU_EFFICIENCY
from palestra.plan.estimate import RunEstimate, estimate
from palestra.plan.shape import find_shape
from palestra.plan.work import StepWork

H200 = DEVICES["h200"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))


def plan(model: str, **work: int) -> RunEstimate:
    return estimate(find_shape(model), H200, StepWork(**work), GPU_EFFICIENCY)  # type: ignore[arg-type]


def as_measured(planned: RunEstimate, slower: float) -> MeasuredStep:
    """A machine on which every part takes so many times as long as planned."""
    time, tokens = planned.time, planned.work.sampled * planned.work.new_tokens
    decode_s = (time.decode.total_s - time.decode.steps * time.decode.host_s) * slower
    host_s = tokens * planned.reached.host_token_s * slower
    return MeasuredStep(time.prefill_s * slower, decode_s, host_s, time.learner_s * slower + time.optimizer_s)


# bound by memory and FLOPs, and by starting kernels
@pytest.mark.parametrize(("model", "problems", "prompt"), [("qwen3-0.6b", 8, 3072), ("tiny", 32, 256)])
@pytest.mark.parametrize("slower", [1.0, 1.4])
def test_a_plan_with_the_measured_efficiencies_gives_the_measured_times(
    model: str, problems: int, prompt: int, slower: float
) -> None:
    planned = plan(model, problems=problems, group_size=8, prompt_tokens=prompt, new_tokens=128)
    measured = as_measured(planned, slower)
    again = replace(planned, reached=calibrated(planned, measured, model)).with_work(planned.work).time
    assert again.prefill_s == pytest.approx(measured.prefill_s, rel=0.15)  # its attention has a share of its own
    host_s = again.decode.steps * again.decode.host_s
    assert again.decode.total_s - host_s == pytest.approx(measured.decode_s, rel=0.02)
    assert host_s == pytest.approx(measured.host_s, rel=0.02)
    assert measured.learner_s is not None
    assert again.learner_s + again.optimizer_s == pytest.approx(measured.learner_s, rel=0.3)
    assert again.rollout_host_s == pytest.approx(planned.time.rollout_host_s * slower, rel=0.01)


def test_what_was_not_measured_stays_as_it_was() -> None:
    planned = plan("qwen3-0.6b", problems=8, group_size=8)
    found = calibrated(planned, replace(as_measured(planned, 2.0), learner_s=None), "m")
    assert found.learner_flop_share == GPU_EFFICIENCY.learner_flop_share
    assert found.learner_layer_s == GPU_EFFICIENCY.learner_layer_s


def test_a_calibration_is_kept_for_its_device_alone() -> None:
    measured = replace(GPU_EFFICIENCY, bandwidth_share=0.5, origin="of palestra bench")
    save_calibration(H200, measured)
    save_calibration(DEVICES["a100"], replace(measured, bandwidth_share=0.6))
    assert efficiency_of(H200) == measured
    assert efficiency_of(DEVICES["a100"]).bandwidth_share == 0.6
    assert efficiency_of(DEVICES["l4"]) == GPU_EFFICIENCY


def test_a_damaged_file_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    calibration_file().write_text("{not json")
    assert efficiency_of(H200) == GPU_EFFICIENCY
    assert "is damaged" in caplog.text


def test_constants_of_another_version_are_passed_over() -> None:
    calibration_file().write_text('{"h200": {"bandwidth_share": 0.4, "old_name": 3}}')
    assert efficiency_of(H200) == replace(GPU_EFFICIENCY, bandwidth_share=0.4)
