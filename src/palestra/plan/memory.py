"""The memory of one GPU in a training step, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from palestra.plan.device import GIB, Device
from palestra.plan.shape import ModelShape
from palestra.plan.work import MICRO_BATCH, StepWork

QUANTISED_BYTES = 0.516  # nf4 with double quantisation
LOGITS_KEPT = 2**31  # bytes of logits that the learner keeps for its backward pass; of more than that
LOGITS_CHUNK = 2**30  # it has one chunk at a time, forward and backward
QLORA_OUTPUT_BYTES = 4  # adapters of 4-bit layers compute in float32, others in the model's dtype
LORA_LAYERS = 1.3  # layers whose adapters' outputs are there at once in the backward pass, computed again
KEPT_INSIDE = 0.45  # of what an uncompiled recurrent layer computes in, what its backward pass needs
MODULE_PATH_FACTOR = 2.5  # activations of uncompiled layers, relative to compiled ones
COMPILED_FROM = 50_000_000  # weights: smaller models are not compiled
WORKSPACE = 0.64 * GIB  # of the libraries' products, of graphs and of the sampler
MAX_MICRO_BATCH = 4 * MICRO_BATCH  # tokens; the host launches no faster for more of them
CAPTURED_SHARE = 0.125  # of a GPU's memory, for activations of captured passes
LAYER_LAUNCHES_S = 5.5e-3  # host time of one layer, forward and backward, including work it could overlap
SMALL_FLOP_SHARE = 0.2  # of the FLOP/s that a small model's layers reach
ACTIVATIONS_SHARE = 0.2  # of a GPU's memory, for activations of micro-batches of more than MICRO_BATCH tokens
USABLE = 0.95  # of a GPU's memory: the rest is the driver's, or in pieces too small
PLANNED = 0.9  # of a GPU's memory, up to which a run fits: the estimate may be too low


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak of a step: the backward pass of the largest micro-batch begins."""

    weights: float
    gradients: float
    optimizer: float
    master_weights: float
    reference: float  # the frozen copy for train.beta
    activations: float
    logits: float
    kv: float
    workspace: float
    kv_sleeps: bool  # the cache is there only while nothing is learned
    kv_least: float = 0.0  # what the cache needs at least; the rest of `kv` is memory that was left

    @property
    def states(self) -> float:
        """Bytes that are allocated for the whole step."""
        fixed = self.weights + self.optimizer + self.master_weights + self.reference
        return fixed + self.gradients + self.workspace

    @property
    def working(self) -> float:
        return self.activations + self.logits

    @property
    def total(self) -> float:
        return self._with_cache(self.kv)

    @property
    def needed(self) -> float:
        """The total with the smallest cache."""
        return self._with_cache(self.kv_least)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by name, as they are shown."""
        return {name: value for name, value in asdict(self).items() if name not in ("kv_sleeps", "kv_least")}

    def _with_cache(self, kv: float) -> float:
        return self.states + (max(self.working, kv) if self.kv_sleeps else self.working + kv)


def memory(shape: ModelShape, device: Device, work: StepWork) -> Memory:
    """The peak of one GPU; the sampler's cache gets what all rollouts need, or what is left."""
    packed, size, full = work.packed, work.weight_bytes, work.method == "full"
    trainable = trained_weights(shape, work)
    has_master = full and ((work.master_weights and size < 4) or work.gpus > 1)
    gradients = trainable * (4 if has_master or not full else size) / work.gpus
    activations = packed.largest * token_activations(shape, device, work)
    logits = _logits(shape, device, work)
    if packed.micro_batches == 1:  # then gradients come while activations go
        gradients = max(0.0, gradients - activations - logits)
    parts = Memory(
        weights=_weights(shape, work),
        gradients=gradients,
        optimizer=8 * trainable / work.gpus,
        master_weights=4 * trainable / work.gpus if has_master else 0.0,
        reference=float(shape.parameters * size) if work.reference and full else 0.0,
        activations=activations,
        logits=logits,
        kv=0.0,
        workspace=WORKSPACE,
        kv_sleeps=work.sleep_mode,
    )
    if work.kv_memory_gib is not None:
        return replace(parts, kv=work.kv_memory_gib * GIB, kv_least=work.kv_memory_gib * GIB)
    of_token = shape.kv_numbers * work.weight_bytes
    room = device.memory_gib * GIB * USABLE - (parts.states if work.sleep_mode else parts.total)
    one = float(work.context * of_token + shape.state_bytes)  # of one rollout
    every = work.kv_tokens * of_token + work.sampled * shape.state_bytes
    return replace(parts, kv=max(one, min(every, room)), kv_least=one)


def trained_weights(shape: ModelShape, work: StepWork) -> int:
    """The number of weights that have a gradient."""
    return shape.parameters if work.method == "full" else shape.adapter_weights(work.lora_rank)


def token_activations(shape: ModelShape, device: Device, work: StepWork) -> float:
    """Bytes that the backward pass needs of one token."""
    size, inside = work.weight_bytes, float(shape.mixer_bytes)
    adapter_bytes = {"full": 0, "lora": size, "qlora": QLORA_OUTPUT_BYTES}[work.method]  # of a number that they give
    adapters = float(shape.linear_outputs * adapter_bytes)
    # of one compiled layer: log-sum-exps, too, and what adapters have inside
    layer = float(shape.layer_outputs * size + 4 * shape.heads + 7 * work.lora_rank * adapter_bytes)
    if work.gradient_checkpointing:  # the inputs of all layers, and the activations of one
        factor = 1.0 if is_compiled(shape, device) else MODULE_PATH_FACTOR
        return shape.layers * shape.hidden * size + (layer + adapters) * factor * MODULE_PATH_FACTOR + inside
    if not is_compiled(shape, device):
        kept = KEPT_INSIDE * inside * (shape.layers - shape.attending or shape.layers)
        return shape.layers * (layer + adapters) * MODULE_PATH_FACTOR + kept
    return shape.layers * layer + LORA_LAYERS * adapters + inside


def suited_micro_batch(shape: ModelShape, device: Device, work: StepWork) -> int:
    """Tokens of a micro-batch where the user sets none: on a GPU, the more the smaller a token's activations are.

    Small models wait for the host, which launches as many kernels for a small micro-batch as for a large one. A power
    of 2, so that a little memory more or less makes no other micro-batches.
    """
    tokens = MICRO_BATCH
    if device.is_gpu:
        kept = token_activations(shape, device, work) - shape.mixer_bytes
        room = ACTIVATIONS_SHARE * device.memory_gib * GIB / kept
        while tokens < MAX_MICRO_BATCH and 2 * tokens <= room:
            tokens *= 2
    return tokens


def captured_micro_batch(shape: ModelShape, device: Device, work: StepWork) -> int:
    """Tokens of the largest micro-batch whose kernels take less time than the host's launches of them.

    Its activations stay allocated from step to step, so they may take little of the memory. 0 where none is captured.
    """
    if not is_compiled(shape, device) or work.method == "qlora" or work.gpus > 1 or work.gradient_checkpointing:
        return 0
    by_time = LAYER_LAUNCHES_S * SMALL_FLOP_SHARE * device.flops / (6 * shape.layer_weights)
    by_memory = CAPTURED_SHARE * device.memory_gib * GIB / token_activations(shape, device, work)
    return int(min(by_time, by_memory))


def is_compiled(shape: ModelShape, device: Device) -> bool:
    """Whether the learner compiles the model's layers."""
    return device.is_gpu and shape.parameters >= COMPILED_FROM


def _logits(shape: ModelShape, device: Device, work: StepWork) -> float:
    """All of them or a chunk, and the head's own gradient, which is added up in float32."""
    packed = work.packed
    scored = min(packed.largest, packed.largest_rows * work.new_tokens)
    whole = float(scored * shape.vocabulary * work.weight_bytes)
    at_once = whole if device.is_gpu and whole <= LOGITS_KEPT else min(whole, LOGITS_CHUNK)
    return at_once + (4 * shape.head_weights if work.method == "full" else 0)


def _weights(shape: ModelShape, work: StepWork) -> float:
    whole = float(shape.parameters * work.weight_bytes)
    if work.method == "qlora":
        linear = shape.layers * shape.linear_layer_weights
        whole = linear * QUANTISED_BYTES + (shape.parameters - linear) * work.weight_bytes
    adapters = 0.0 if work.method == "full" else shape.adapter_weights(work.lora_rank) * 4.0
    if work.gpus > 1:  # whole, to sample from; the shard that is trained is the master weights
        return whole + adapters
    copied = (whole if work.method == "full" else adapters) if work.max_staleness else 0.0
    return whole + adapters + copied
