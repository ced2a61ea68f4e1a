"""The share of a device's peak that engine and learner reach, measured for `palestra plan`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.bench.workload import Workload
from palestra.core.config import RunConfig
from palestra.core.phases import phases
from palestra.core.types import Sample
from palestra.learner.local import LocalLearner
from palestra.plan.calibration import MeasuredStep, calibrated
from palestra.plan.device import Device, Efficiency, default_efficiency
from palestra.plan.estimate import RunEstimate, estimate
from palestra.plan.memory import suited_micro_batch
from palestra.plan.shape import ModelShape
from palestra.plan.work import StepWork


def calibrate(
    model: Any, shape: ModelShape, device: Device, work: Workload, sample: Callable[[], int], name: str
) -> Efficiency:
    """Sample and learn once; `sample` runs all rollouts of the single turn through the engine."""
    planned = plan_of(shape, device, work, model.dtype.itemsize)
    phases.take()
    began = time.perf_counter()
    sample()
    wall_s, times = time.perf_counter() - began, phases.take()
    prefill_s, decode_s = times.get("prefill", 0.0), times.get("decode", 0.0)
    learner_s = learning_seconds(model, shape, work) if planned.fits else None
    return calibrated(planned, MeasuredStep(prefill_s, decode_s, wall_s - prefill_s - decode_s, learner_s), name)


def plan_of(shape: ModelShape, device: Device, work: Workload, weight_bytes: int) -> RunEstimate:
    step = StepWork(
        problems=work.prompts,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        weight_bytes=weight_bytes,
    )
    step = replace(step, tokens_per_micro_batch=suited_micro_batch(shape, device, step))
    return estimate(shape, device, step, default_efficiency(device))


def learning_seconds(model: Any, shape: ModelShape, work: Workload) -> float:
    """One optimizer step on all rollouts, after one that compiles; the weights stay as they are."""
    learner = LocalLearner(model, config=RunConfig.build({"rollout.temperature": 1.0}))
    batch = Batch.of(random_samples(work, shape.vocabulary))
    loss = StepLoss.of(batch, Objective(), max_completion_length=work.new_tokens)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        learner.forward_backward(batch, loss)
        learner.optim_step(0.0, max_grad_norm=1.0)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds


def random_samples(work: Workload, vocabulary: int) -> list[Sample]:
    luck, samples = random.Random(0), []
    for group in range(work.prompts):
        prompt = luck.choices(range(vocabulary), k=work.prompt_tokens)
        for sibling in range(work.group_size):
            ids = prompt + luck.choices(range(vocabulary), k=work.new_tokens)
            mask = [i >= work.prompt_tokens for i in range(len(ids))]
            none = [False] * len(ids)
            fields: Any = (ids, mask, none, [-8.0] * len(ids), sibling + 0.5 - work.group_size / 2, group, len(prompt))
            samples.append(Sample(*fields))
    return samples
