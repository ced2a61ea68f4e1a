"""Efficiencies measured by `palestra bench`, kept for each device in the user's cache."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from palestra.core.files import cache_folder, write_text
from palestra.plan.device import Device, Efficiency, default_efficiency
from palestra.plan.estimate import RunEstimate

log = logging.getLogger("palestra")
_HOST_RANGE = 5.0  # a host more than so many times slower or faster was busy with something else


def calibration_file() -> Path:
    return cache_folder() / "calibration.json"


def efficiency_of(device: Device) -> Efficiency:
    """What `palestra bench` found on such a device, or the defaults."""
    default = default_efficiency(device)
    found = _read().get(device.name)
    return default if found is None else Efficiency.from_json(found, default)


def save_calibration(device: Device, measured: Efficiency) -> Path:
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(_read() | {device.name: asdict(measured)}, indent=1) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds of one step's work as `palestra bench` does it: no agent loop, no tools, no records."""

    prefill_s: float
    decode_s: float
    host_s: float  # of sampling: the scheduler and the event loop
    learner_s: float | None  # forward, backward and optimizer; None where they were not measured


def calibrated(planned: RunEstimate, measured: MeasuredStep, model: str) -> Efficiency:
    """The efficiencies by which the plan of a measured step would have been right.

    Of each part one constant is fitted, that of its largest term: the others cannot be seen in one measurement. The
    host's constants are all scaled by one factor, how fast it is beside the one of the defaults.
    """
    reached, decode, layers = planned.reached, planned.time.decode, planned.shape.layers
    new: dict[str, Any] = {"origin": f"of palestra bench, {model}, {time.strftime('%Y-%m-%d')}"}
    new["prefill_flop_share"] = _share(reached.prefill_flop_share, planned.time.prefill_s, measured.prefill_s)
    step_s, reading_s = measured.decode_s / decode.steps, decode.weights_s + decode.kv_s
    if reading_s > decode.launch_s:
        left = max(step_s - decode.launch_s, 0.1 * step_s)
        new["bandwidth_share"] = _share(reached.bandwidth_share, reading_s, left)
    else:
        new["decode_layer_s"] = max(step_s - reading_s, 0.1 * step_s) / layers
    tokens = planned.work.sampled * planned.work.new_tokens
    host = min(_HOST_RANGE, max(1 / _HOST_RANGE, measured.host_s / tokens / reached.host_token_s))
    for name in ("host_token_s", "host_turn_s", "host_sample_s", "host_text_s", "host_step_s"):
        new[name] = getattr(reached, name) * host
    if measured.learner_s is not None:
        learner_s = max(measured.learner_s - planned.time.optimizer_s, 0.1 * measured.learner_s)
        launching = planned.work.packed.micro_batches * layers * reached.learner_layer_s
        if planned.time.learner_s <= launching * 1.0001:
            new["learner_layer_s"] = reached.learner_layer_s * learner_s / planned.time.learner_s
        else:
            new["learner_flop_share"] = _share(reached.learner_flop_share, planned.time.learner_s, learner_s)
    return replace(reached, **new)


def _share(assumed: float, planned_s: float, measured_s: float) -> float:
    """The efficiency at which the planned time equals the measured one, at most 1."""
    return min(1.0, max(0.001, assumed * planned_s / max(measured_s, 1e-9)))


def _read() -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(calibration_file().read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s is damaged (%s), and passed over; `palestra bench` writes it anew", calibration_file(), error)
        return {}
