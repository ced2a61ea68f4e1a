"""Efficiencies measured by `palestra bench`, kept for each device in the user's cache."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from palestra.core.files import cache_folder, write_text
from palestra.plan.device import Device, Efficiency, default_efficiency
from palestra.plan.estimate import RunEstimate

log = logging.getLogger("palestra")


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


def calibrated(
    planned: RunEstimate, *, prefill_s: float, decode_s: float, host_s: float, learner_s: float | None, model: str
) -> Efficiency:
    """The efficiencies by which the plan of a measured step would have been right.

    Of each part one constant is fitted, that of its largest term: the others cannot be seen in one measurement.
    """
    reached, decode = planned.reached, planned.time.decode
    new: dict[str, Any] = {"origin": f"palestra bench, {model}, {time.strftime('%Y-%m-%d')}"}
    new["prefill_flop_share"] = _share(reached.prefill_flop_share, planned.time.prefill_s, prefill_s)
    step_s = decode_s / decode.steps
    reading = decode.weights_s + decode.kv_s
    if reading > decode.launch_s:
        left = max(step_s - decode.launch_s - decode.host_s, 0.1 * step_s)
        new["bandwidth_share"] = _share(reached.bandwidth_share, reading, left)
    else:
        left = max(step_s - reading - decode.host_s, 0.1 * step_s)
        new["decode_layer_s"] = left / planned.shape.layers
    turns = planned.work.sampled * planned.work.turns
    new["host_turn_s"] = host_s / turns
    if learner_s is not None:
        launching = planned.work.packed.micro_batches * planned.shape.layers * reached.learner_layer_s
        if planned.time.learner_s <= launching * 1.0001:
            new["learner_layer_s"] = reached.learner_layer_s * learner_s / planned.time.learner_s
        else:
            new["learner_flop_share"] = _share(reached.learner_flop_share, planned.time.learner_s, learner_s)
    return replace(reached, **new)


def _share(assumed: float, planned_s: float, measured_s: float) -> float:
    """The share by which the planned time is the measured one; none reaches more than all."""
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
