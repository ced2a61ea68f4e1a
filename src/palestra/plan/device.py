"""Devices, and the share of their peak figures that engine and learner reach."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.core.errors import NotFoundError, did_you_mean

GIB = 1 << 30
GPUS_OF_A_NODE = 8


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a CPU with a number of threads, by its data sheet."""

    name: str
    memory_gib: float
    bandwidth: float  # bytes/s of its memory
    flops: float  # dense bfloat16 (on a CPU float32) operations/s
    link: float = 0.0  # bytes/s to the other GPUs of its machine, in one direction
    node_link: float = 50e9  # bytes/s to GPUs of other machines: a network card of 400 Gbit/s each
    is_gpu: bool = True

    @property
    def weight_bytes(self) -> int:
        """Of one weight: bfloat16 on a GPU, float32 on a CPU."""
        return 2 if self.is_gpu else 4


# memory as torch reports it, bandwidth and dense bfloat16 FLOP/s by the makers' data sheets
DEVICES = {
    device.name: device
    for device in (
        Device("b200", 178.3, 8.0e12, 2250e12, 900e9),
        Device("h200", 139.8, 4.8e12, 989e12, 450e9),
        Device("h100", 79.1, 3.35e12, 989e12, 450e9),
        Device("h100-pcie", 79.1, 2.0e12, 756e12, 64e9),
        Device("a100", 79.2, 2.04e12, 312e12, 300e9),
        Device("a100-40gb", 39.4, 1.55e12, 312e12, 300e9),
        Device("l40s", 44.4, 0.864e12, 362e12, 32e9),
        Device("l4", 22.0, 0.3e12, 121e12, 32e9),
        Device("a10", 22.0, 0.6e12, 125e12, 32e9),
        Device("rtx-5090", 31.4, 1.79e12, 210e12, 64e9),
        Device("rtx-4090", 23.5, 1.008e12, 165e12, 32e9),
        Device("rtx-3090", 23.6, 0.936e12, 71e12, 32e9),
    )
}
_CORE_BANDWIDTH, _CORE_FLOPS = 10e9, 100e9  # one core with AVX-512, float32


def cpu(threads: int, memory_gib: float) -> Device:
    name = f"cpu, {threads} thread{'s' * (threads > 1)}"
    return Device(name, memory_gib, _CORE_BANDWIDTH * min(threads, 8), _CORE_FLOPS * threads, is_gpu=False)


def find_device(name: str) -> Device:
    """A GPU by its short name, or by what torch calls it.

    >>> find_device("NVIDIA H200").name, find_device("NVIDIA A100-SXM4-80GB").name, find_device("RTX 4090").name
    ('h200', 'a100', 'rtx-4090')
    """
    key = name.lower().replace("nvidia", "").replace("geforce", "").strip().replace(" ", "-")
    if key in DEVICES:
        return DEVICES[key]
    matches = [d for short, d in DEVICES.items() if all(part in key for part in short.removesuffix("-40gb").split("-"))]
    if "a100" in key and "40gb" in key:
        return DEVICES["a100-40gb"]
    if not matches:
        raise NotFoundError(
            f"there are no figures for the GPU {name!r}, only for {', '.join(DEVICES)}.{did_you_mean(key, DEVICES)} "
            "Give its own: --memory-gib, --bandwidth (TB/s) and --tflops"
        )
    return max((d for d in matches if d.name != "a100-40gb"), key=lambda d: len(d.name))


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peak figures that are reached, and host times; fitted to measured steps on an H200."""

    bandwidth_share: float = 0.85  # of the memory's bandwidth, in decode steps, element-wise kernels and the optimizer
    decode_layer_s: float = 39e-6  # starting the kernels of one layer of a decode step
    lora_layer_s: float = 40e-6  # what adapters add to that
    prefill_flop_share: float = 0.5  # of the FLOP/s, in the products of a prefill
    learner_flop_share: float = 0.69  # the same in the learner
    attention_flop_share: float = 0.35  # of the FLOP/s, in attention over many tokens
    elementwise_passes: float = 24.0  # reads and writes of each activation by the learner outside of products
    learner_layer_s: float = 5.5e-3  # the host's share of one layer of a micro-batch, forward and backward
    host_token_s: float = 0.4e-6  # the scheduler, for each sampled token
    host_turn_s: float = 0.55e-3  # agent loop, template and tokenizer, for each turn of an attempt
    host_sample_s: float = 1.6e-3  # scores, records and packing, for each attempt
    origin: str = "measured on an H200 (benchmarks/RESULTS.md)"


_ON_CPU = Efficiency(
    0.7, 1e-3, 0.5e-3, 0.7, 0.5, 0.2, 9.0, 15e-3, 10e-6, 0.6e-3, 1e-3,
    origin="measured on two cores with AVX-512 (benchmarks/RESULTS.md)",
)  # fmt: skip


def efficiency_of(device: Device) -> Efficiency:
    return Efficiency() if device.is_gpu else _ON_CPU
