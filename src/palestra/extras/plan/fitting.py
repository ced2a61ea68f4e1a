"""Settings with which a run that is too large would fit, and how many GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from palestra.plan.estimate import SMALLER, RunEstimate
from palestra.plan.work import METHODS, StepWork

_METHOD_SETTINGS = {"lora": "--lora.r {rank}", "qlora": "--lora.load_in_4bit true"}
MAX_GPUS = 1024


class Suggestion(NamedTuple):
    """Other settings for the run, as command-line options, and its work with them."""

    settings: str
    work: StepWork


def changes_that_fit(planned: RunEstimate) -> Suggestion | None:
    """The least change by which it would fit on as many GPUs; None where none of those that are tried is enough."""
    tried = _smaller(planned.work)
    return next((change for change in tried if change.settings and planned.with_work(change.work).fits), None)


def gpus_that_fit(planned: RunEstimate) -> int | None:
    """The fewest GPUs, doubled from those there are, on which it would fit as it is."""
    gpus = planned.work.gpus
    while gpus <= (MAX_GPUS if planned.work.method != "qlora" else 1):  # 4-bit weights are not divided
        if planned.with_work(replace(planned.work, gpus=gpus)).fits:
            return gpus
        gpus *= 2
    return None


def remedy(planned: RunEstimate) -> str:
    """For an error: the settings by which it would fit, and how many GPUs."""
    change, gpus = changes_that_fit(planned), gpus_that_fit(planned)
    texts = [f"use {change.settings}"] if change else []
    texts += [f"{gpus} such GPUs"] if gpus and gpus > planned.work.gpus else []
    return ", or ".join(texts) or SMALLER


def _smaller(work: StepWork) -> Iterator[Suggestion]:
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
        yield Suggestion(" ".join(settings), changed)
        while tokens > work.context:
            tokens = max(tokens // 2, work.context)
            text = " ".join([*settings, f"--train.tokens_per_micro_batch {tokens}"])
            yield Suggestion(text, replace(changed, tokens_per_micro_batch=tokens))
