"""The estimate of a run: time, memory, cost, what holds it up, and which settings would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from palestra.plan.device import GIB, Device, Efficiency
from palestra.plan.memory import USABLE, Memory, memory
from palestra.plan.shape import ModelShape
from palestra.plan.step_time import StepTime, step_time
from palestra.plan.work import METHODS, StepWork

_HINTS = {
    "decode, starting kernels": "more rollouts at once: a larger rollout.group_size or train.problems_per_step",
    "decode, reading weights": "more rollouts at once share the reading, up to what the KV cache holds",
    "decode, reading the KV cache": "shorter rollouts (rollout.max_new_tokens, prompts), or more GPUs",
    "decode, the scheduler": "fewer, longer rollouts; or more GPUs, each with its own engine",
    "prefill": "shorter prompts, or larger groups: a prompt is computed once for its group",
    "agent loop": "tools and templates: rollout.max_staleness=2 samples on while they work",
    "learner": "more GPUs, fewer tokens a step; without model.gradient_checkpointing if that is on",
    "optimizer": "LoRA, or more rollouts in a step",
    "communication": "a larger train.tokens_per_micro_batch, LoRA, or fewer GPUs",
    "rest": "fewer records: track.rollouts_every",
}
_METHOD_SETTINGS = {"lora": "--lora.r {rank}", "qlora": "--lora.load_in_4bit true"}
MAX_GPUS = 1024


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Other settings for the run, as command-line options, and the estimate with them."""

    settings: str
    work: StepWork


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """One step of a run on one kind of device."""

    shape: ModelShape
    device: Device
    work: StepWork
    memory: Memory
    time: StepTime
    reached: Efficiency

    @property
    def room(self) -> float:
        """Bytes of a GPU that can be used."""
        return self.device.memory_gib * GIB * USABLE

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second of the whole step, on all GPUs."""
        return self.work.sampled * self.work.gpus * self.work.new_tokens / self.time.total_s

    def cost(self, price_per_hour: float, steps: int) -> float:
        """Of so many steps, at a price for one GPU's hour."""
        return self.time.total_s * steps / 3600 * self.work.gpus * price_per_hour

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The part that takes the largest share of a step, and that share."""
        decode, parts = self.time.decode, dict(self.time.parts)
        del parts["decode"]
        for text, seconds in (
            ("starting kernels", decode.launch_s),
            ("reading weights", decode.weights_s),
            ("reading the KV cache", decode.kv_s),
            ("the scheduler", decode.host_s),
        ):
            parts[f"decode, {text}"] = decode.steps * seconds
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name] / sum(parts.values())

    @property
    def hint(self) -> str:
        """What makes the bottleneck smaller."""
        return _HINTS[self.bottleneck[0]]

    def with_work(self, work: StepWork) -> RunEstimate:
        return estimate(self.shape, self.device, work, self.reached)

    def changes_that_fit(self) -> Suggestion | None:
        """The least change by which it would fit on as many GPUs; None where none of those that are tried is enough."""
        tried = (Suggestion(text, work) for text, work in _smaller(self.work) if text)
        return next((change for change in tried if self.with_work(change.work).fits), None)

    def gpus_that_fit(self) -> int | None:
        """The fewest GPUs, doubled from those there are, on which it would fit as it is."""
        gpus = self.work.gpus
        while gpus <= (MAX_GPUS if self.work.method != "qlora" else 1):  # 4-bit weights are not divided
            if self.with_work(replace(self.work, gpus=gpus)).fits:
                return gpus
            gpus *= 2
        return None

    def remedy(self) -> str:
        """For an error: the settings by which it would fit, and how many GPUs."""
        change, gpus = self.changes_that_fit(), self.gpus_that_fit()
        texts = [f"use {change.settings}"] if change else []
        texts += [f"{gpus} such GPUs"] if gpus and gpus > self.work.gpus else []
        return ", or ".join(texts) or "use a smaller model, shorter rollouts or a larger GPU"


def estimate(shape: ModelShape, device: Device, work: StepWork, reached: Efficiency) -> RunEstimate:
    found = memory(shape, device, work)
    return RunEstimate(shape, device, work, found, step_time(shape, device, work, found, reached), reached)


def least(found: RunEstimate) -> RunEstimate:
    """With the smallest micro-batch and cache there can be: where out-of-memory handling ends."""
    work = found.work
    return found.with_work(replace(work, tokens_per_micro_batch=work.context, group_size=1, kv_memory_gib=None))


def _smaller(work: StepWork) -> Iterator[tuple[str, StepWork]]:
    """Smaller runs, the least intrusive change first; of each the larger micro-batches first."""
    methods = [m for m in METHODS[METHODS.index(work.method) :] if m != "qlora" or work.gpus == 1]
    checkpointing = (False, True) if not work.gradient_checkpointing else (False,)
    sleeping = (False, True) if not work.sleep_mode and not work.max_staleness else (False,)
    choices = product(range(len(methods)), checkpointing, sleeping)
    for method, recompute, sleep in sorted(choices, key=lambda choice: (4 * choice[0] + choice[1] + choice[2], choice)):
        settings = ["--model.gradient_checkpointing true"] * recompute + ["--model.sleep_mode true"] * sleep
        if methods[method] != work.method:
            settings.append(_METHOD_SETTINGS[methods[method]].format(rank=work.lora_rank))
        if work.kv_memory_gib is not None:
            settings.append("--model.kv_memory_gib none")
        changed = replace(
            work,
            method=methods[method],
            gradient_checkpointing=work.gradient_checkpointing or recompute,
            sleep_mode=work.sleep_mode or sleep,
            kv_memory_gib=None,
        )
        tokens = work.tokens_per_micro_batch
        yield " ".join(settings), changed
        while tokens > work.context:
            tokens = max(tokens // 2, work.context)
            text = " ".join([*settings, f"--train.tokens_per_micro_batch {tokens}"])
            yield text, replace(changed, tokens_per_micro_batch=tokens)
