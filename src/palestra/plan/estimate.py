"""The estimate of a run: time and memory of a step, and the bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from palestra.core.extras import is_installed, provided
from palestra.plan.device import GIB, GPUS_OF_A_NODE, Device, Efficiency, efficiency_of
from palestra.plan.memory import (
    MODULE_PATH_FACTOR,
    PLANNED,
    Memory,
    captured_micro_batch,
    is_compiled,
    memory,
    trained_weights,
)
from palestra.plan.shape import ModelShape
from palestra.plan.work import MAX_RUNNING, StepWork

LINK_SHARE = 0.7  # of a link's figure, in collectives
FLASH_BACKWARD = 2.5  # the backward pass of attention, in forward passes
OPTIMIZER_BYTES = 30  # of memory traffic for each weight of an optimizer step: gradient, norm, moments, master, copy
BLOCK_ROWS = 8  # siblings that read their prompt once
SHARED_RATE = 0.71  # of the bandwidth, where they do
CAPTURED_PADDING = 1.35  # tokens of a captured micro-batch with padding, relative to those without
REPLAY_S = 0.015  # host time of one replay that does not overlap with the GPU: packing, loss and optimizer
SMALLER = "use a smaller model, shorter rollouts or a larger GPU"


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """One step of a run on one kind of device."""

    shape: ModelShape
    device: Device
    work: StepWork
    memory: Memory
    time: StepTime

    @property
    def room(self) -> float:
        """Bytes of a GPU that a run may plan to use."""
        return self.device.memory_gib * GIB * PLANNED

    @property
    def fits(self) -> bool:
        """Whether the memory that it needs, without what the cache takes of the rest, leaves some headroom."""
        return self.memory.needed <= self.room

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The part that takes the largest share of a step, and that share."""
        parts = self.time.parts
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name] / sum(parts.values())

    def with_work(self, work: StepWork) -> RunEstimate:
        return estimate(self.shape, self.device, work)

    def remedy(self) -> str:
        """For an error: the settings by which it would fit, and how many GPUs."""
        if is_installed("plan"):
            return str(provided("settings that fit")(self))
        return SMALLER


def estimate(shape: ModelShape, device: Device, work: StepWork) -> RunEstimate:
    """The time and memory of one step."""
    needed = memory(shape, device, work)
    return RunEstimate(shape, device, work, needed, step_time(shape, device, work, needed))


def least(planned: RunEstimate) -> RunEstimate:
    """With the smallest micro-batch and cache there can be: where out-of-memory handling ends."""
    work = planned.work
    return planned.with_work(replace(work, tokens_per_micro_batch=work.context, group_size=1, kv_memory_gib=None))


# The time of a step


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """The decode steps: rows of each, how many there are, and the seconds of all by what they are spent on."""

    rows: int
    steps: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step. Sampling and learning follow one another, or overlap where rollouts may be stale."""

    decode: DecodeTime
    sampling: dict[str, float]  # seconds by part
    learning: dict[str, float]
    overlaps: bool

    @property
    def sampling_s(self) -> float:
        return sum(self.sampling.values())

    @property
    def learning_s(self) -> float:
        return sum(self.learning.values())

    @property
    def total_s(self) -> float:
        both = (self.sampling_s, self.learning_s)
        return max(both) if self.overlaps else sum(both)

    @property
    def parts(self) -> dict[str, float]:
        return self.sampling | self.learning


def step_time(shape: ModelShape, device: Device, work: StepWork, needed: Memory) -> StepTime:
    """One step of one GPU, all of them working alike."""
    reached = efficiency_of(device)
    moved = OPTIMIZER_BYTES * trained_weights(shape, work) / work.gpus
    optimizer = moved / (device.bandwidth * reached.bandwidth_share)
    decode = _decode(shape, device, work, needed, reached)
    learner, communication = _learner(shape, device, work, reached)
    sampling = {
        "prefill": _prefill(shape, device, work, reached),
        "decode": sum(decode.parts.values()),
        "agent loop": work.sampled * work.turns * reached.host_turn_s + (work.turns - 1) * work.tool_s,
    }
    learning = {
        "learner": learner,
        "optimizer": work.iterations * work.minibatches * optimizer,
        "communication": communication,  # what the learner waits for beyond its own work
        "rest": work.sampled * reached.host_sample_s,
    }
    return StepTime(decode, sampling, learning, overlaps=work.max_staleness > 0)


def _products(shape: ModelShape, tokens: float, scored: float) -> float:
    """Operations of a forward pass: all layers for every token, the head where a token is predicted."""
    return 2 * shape.layers * shape.layer_weights * tokens + 2 * shape.head_weights * scored


def _attention(shape: ModelShape, pairs: float) -> float:
    return 4 * shape.attending * shape.heads * shape.head_dim * pairs


def _prefill(shape: ModelShape, device: Device, work: StepWork, reached: Efficiency) -> float:
    """The prompt once for a group, what tools add once for each rollout."""
    added = work.sampled * work.tool_tokens
    tokens = work.groups_sampled * work.prompt_tokens + added
    pairs = work.groups_sampled * work.prompt_tokens**2 / 2 + added * (work.prompt_tokens + work.completion / 2)
    products = _products(shape, tokens, work.sampled * work.turns) / reached.prefill_flop_share
    return (products + _attention(shape, pairs) / reached.attention_flop_share) / device.flops


def _decode(shape: ModelShape, device: Device, work: StepWork, needed: Memory, reached: Efficiency) -> DecodeTime:
    """Every step reads all weights, and the cache of every row."""
    size, bandwidth = work.weight_bytes, device.bandwidth * reached.bandwidth_share
    of_token = shape.kv_numbers * size
    fitting = work.sampled * needed.kv / max(1.0, work.kv_tokens * of_token + work.sampled * shape.state_bytes)
    rows = max(1, min(work.sampled, MAX_RUNNING, int(fitting + 0.01)))
    steps = work.sampled / rows * work.new_tokens
    read = shape.layers * shape.read_layer_weights(rows) + shape.head_weights
    computed = _products(shape, rows, rows) / (device.flops * reached.prefill_flop_share)
    states = 2 * rows * shape.state_bytes / bandwidth  # read and written
    launch = reached.decode_layer_s + (reached.lora_layer_s if work.method != "full" else 0.0)
    parts = {
        "starting kernels": shape.layers * launch,
        "reading weights": max(read * size / bandwidth, computed),
        "reading the KV cache": _tokens_read(work, rows) * of_token / bandwidth + states,
        "the scheduler": rows * reached.host_token_s,
    }
    return DecodeTime(rows, steps, {name: steps * seconds for name, seconds in parts.items()})


def _tokens_read(work: StepWork, rows: int) -> float:
    """Tokens whose KV a decode step reads; those of a prompt once for up to 8 siblings that share it."""
    blocks = min(rows, max(1.0, rows / work.group_size) * math.ceil(work.group_size / BLOCK_ROWS))
    return rows * work.completion / 2 + blocks * work.prompt_tokens / (1.0 if work.group_size == 1 else SHARED_RATE)


def _learner(shape: ModelShape, device: Device, work: StepWork, reached: Efficiency) -> tuple[float, float]:
    """Forward and backward of all micro-batches, and what waiting for other GPUs adds to it."""
    packed = work.packed
    forward = _products(shape, packed.tokens, work.trained * work.new_tokens)
    passes = 3.0 if work.method == "full" else 2.0  # frozen weights have no gradient
    passes += 1.0 if work.gradient_checkpointing else 0.0
    forwards = (1.0 if work.reference else 0.0) + (1.0 if work.minibatches > 1 else 0.0)
    products = forward * (passes * work.iterations + forwards)
    attention = _attention(shape, work.attention_pairs) * (1 + FLASH_BACKWARD) * work.iterations
    activations = packed.tokens * shape.layers * shape.layer_outputs * work.weight_bytes
    moved = activations * reached.elementwise_passes * work.iterations
    moved *= 1.0 if is_compiled(shape, device) else MODULE_PATH_FACTOR
    computing = (
        products / (device.flops * reached.learner_flop_share)
        + attention / (device.flops * reached.attention_flop_share)
        + moved / (device.bandwidth * reached.bandwidth_share)
    )
    launching = packed.micro_batches * shape.layers * reached.learner_layer_s * work.iterations
    working = max(computing, launching)
    if packed.largest * CAPTURED_PADDING <= captured_micro_batch(shape, device, work):
        working = min(working, computing * CAPTURED_PADDING + packed.micro_batches * REPLAY_S * work.iterations)
    if work.gpus == 1:
        return working, 0.0
    # FSDP2 gathers weights for the forward and the backward pass and reduces gradients, in each micro-batch; then
    # every GPU gathers the new weights for its sampler
    within = device.link if work.gpus <= GPUS_OF_A_NODE else min(device.link, device.node_link)
    link = (within or device.node_link) * LINK_SHARE
    weights = trained_weights(shape, work)
    moved = (2 * work.weight_bytes + 4) * weights * (work.gpus - 1) / work.gpus
    return working, max(0.0, packed.micro_batches * moved / link - working) + weights * work.weight_bytes / link


def duration_text(seconds: float) -> str:
    """
    >>> duration_text(0.0421), duration_text(3.21), duration_text(75), duration_text(7300)
    ('42 ms', '3.2 s', '75 s', '2.0 h')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 300:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
