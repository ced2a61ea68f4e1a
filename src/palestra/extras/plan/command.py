"""`palestra plan`: step time, memory and cost of a training, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from palestra.cli import settings
from palestra.cli.common import returns_data
from palestra.core.config import RunConfig
from palestra.core.config_sections import LORA_RANK
from palestra.core.errors import SettingError
from palestra.core.machine import memory_gib, processors
from palestra.extras.plan.fitting import changes_that_fit, gpus_that_fit
from palestra.extras.plan.shapes import find_shape, known_shapes
from palestra.plan.device import GIB, Device, cpu, efficiency_of, find_device
from palestra.plan.estimate import RunEstimate, duration_text, estimate
from palestra.plan.memory import PLANNED
from palestra.plan.of_config import with_suited_step, work_of
from palestra.runs.request import RunRequest

_DEFAULT_CONTEXT = 2048
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


class Count(click.ParamType):
    """A number of tokens: 8192 or 8k."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(k?)", str(value).lower())
        if not match or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a number of tokens such as 8192 or 8k", param, ctx)
        return int(float(match[1]) * (1024 if match[2] else 1))


COUNT = Count()


@settings.command_of_run("plan", returns_data)
@click.option("--gpu", default="h200", show_default=True, metavar="NAME", help="h200, a100, rtx-4090, …, or cpu.")
@click.option("--gpus", default=1, show_default=True, help="Number of GPUs, with FSDP2.")
@click.option("--memory-gib", type=float, metavar="GIB", help="Memory of a GPU that is not listed.")
@click.option("--bandwidth", type=float, metavar="TB/S", help="Memory bandwidth of that GPU.")
@click.option("--tflops", type=float, metavar="TFLOP/S", help="Dense bfloat16 TFLOP/s of that GPU.")
@click.option("--context", type=COUNT, help="Tokens of a whole rollout.  [default: 2k, or by the parts]")
@click.option("--new-tokens", type=COUNT, help="Tokens that the model samples of these.  [default: a quarter]")
@click.option("--turns", default=1, show_default=True, help="Model turns in a rollout.")
@click.option("--tool-tokens", type=COUNT, help="Tool tokens in a rollout.  [default: 128 for each turn but one]")
@click.option("--tool-seconds", default=0.0, help="Duration of a tool call.")
@click.option("--group", type=int, help="Rollouts of a problem (rollout.group_size).")
@click.option("--problems", type=int, help="Problems of a step (train.problems_per_step).")
@click.option("--method", type=click.Choice(["full", "lora", "qlora"]), help="What is trained.  [default: by lora.r]")
@click.option("--signal", default=1.0, show_default=True, help="Share of the groups whose rewards differ.")
@click.option("--steps", type=int, help="Steps of the run.  [default: train.max_steps, or 100]")
@click.option("--price", type=float, metavar="PER_HOUR", help="Price of one GPU; prints the cost.")
@click.option("--models", "list_models", is_flag=True, help="List the models that are known by name.")
def command(
    gpu: str,
    gpus: int,
    context: int | None,
    new_tokens: int | None,
    turns: int,
    tool_tokens: int | None,
    steps: int | None,
    price: float | None,
    list_models: bool,
    config_file: Path | None,
    console: Console,
    **parameters: Any,
) -> dict[str, Any] | None:
    """Predict step time, memory and cost of a training, its bottleneck, and the settings that fit.

    No model is loaded: the estimate is based on the model's shape, the device's data sheet, and what engine and learner
    reached of it on an H200. Every rollout is assumed to use all of its tokens. --model takes a name that --models
    lists, a model's folder, or a config.json.

    \b
    Examples:
      palestra plan --model qwen3-8b --gpus 8 --context 8k --group 16 --problems 64
      palestra plan --model qwen3-1.7b --gpu rtx-4090 --method lora --price 0.4
      palestra plan --model ./my-model --config run.yaml --train.tokens_per_micro_batch 8192
    """
    if list_models:
        for name, shape in known_shapes().items():
            click.echo(f"{name:16} {shape.parameters / 1e9:7.3f} B weights")
        return None
    config, device = _config(parameters, config_file, new_tokens, context), _device(gpu, parameters)
    shape = find_shape(config.model.name)
    config = with_suited_step(config, shape, device, gpus=gpus)
    new, tools = config.rollout.max_new_tokens, 128 * (turns - 1) if tool_tokens is None else tool_tokens
    whole = context or max(_DEFAULT_CONTEXT, 2 * (new + tools))
    if whole <= new + tools:
        raise SettingError(
            f"--context {whole} leaves no room for a prompt next to {new} sampled tokens and {tools} tool tokens; "
            "raise it, or lower --new-tokens or --tool-tokens"
        )
    rollouts = {"prompt_tokens": whole - new - tools, "tool_tokens": tools, "turns": turns, "gpus": gpus}
    extra = {"signal": parameters["signal"], "tool_s": parameters["tool_seconds"]}
    work = work_of(config, shape, device, **rollouts, **extra)
    if shape.context and work.context > shape.context:
        raise SettingError(f"{work.context} tokens; {config.model.name} holds {shape.context}; lower --context")
    planned, steps = estimate(shape, device, work), steps or config.train.max_steps or 100
    _print(console, config.model.name, planned, steps, price)
    return summary(planned, steps, price)


def _config(
    parameters: dict[str, Any], config_file: Path | None, new_tokens: int | None, context: int | None
) -> RunConfig:
    """The YAML file, the settings and the short options, in one."""
    options = settings.from_options(parameters)
    short = {
        "rollout.group_size": parameters["group"],
        "train.problems_per_step": parameters["problems"],
        "rollout.max_new_tokens": new_tokens,
    }
    layer = {name: value for name, value in short.items() if value is not None}
    if parameters["method"] == "full":
        layer["lora.r"] = 0
    elif parameters["method"] is not None:
        layer["lora.r"] = options.get("lora.r") or LORA_RANK
        layer["lora.load_in_4bit"] = parameters["method"] == "qlora"
    file = settings.read_settings(config_file, {}).settings
    if "rollout.max_new_tokens" not in {**file, **options, **layer}:
        layer["rollout.max_new_tokens"] = max(1, (context or _DEFAULT_CONTEXT) // 4)
    return RunRequest(settings={**file, **options, **layer}).config()


def _device(name: str, parameters: dict[str, Any]) -> Device:
    units = {"memory_gib": 1.0, "bandwidth": 1e12, "tflops": 1e12}
    known = {key.replace("tflops", "flops"): parameters[key] * unit for key, unit in units.items() if parameters[key]}
    if name.startswith("cpu"):
        return replace(cpu(processors(), memory_gib()), **known)
    return Device(name, **known) if len(known) == len(units) else replace(find_device(name), **known)


def sampled_per_s(planned: RunEstimate) -> float:
    """Sampled tokens a second of the whole step, on all GPUs."""
    return planned.work.sampled * planned.work.gpus * planned.work.new_tokens / planned.time.total_s


def cost_of(planned: RunEstimate, price_per_hour: float, steps: int) -> float:
    """The cost of a number of steps, at a price for one GPU hour."""
    return planned.time.total_s * steps / 3600 * planned.work.gpus * price_per_hour


def hint_of(planned: RunEstimate) -> str:
    """How to reduce the bottleneck; of decode, its largest part."""
    name, decode = planned.bottleneck[0], planned.time.decode.parts
    return _HINTS[f"decode, {max(decode, key=lambda part: decode[part])}" if name == "decode" else name]


def summary(planned: RunEstimate, steps: int, price: float | None) -> dict[str, Any]:
    """All numbers of an estimate, for programs."""
    (name, share), time, memory = planned.bottleneck, planned.time, planned.memory
    change = None if planned.fits else changes_that_fit(planned)
    return {
        "device": planned.device.name,
        "gpus": planned.work.gpus,
        "parameters": planned.shape.parameters,
        "step_s": round(time.total_s, 4),
        "sampling_s": round(time.sampling_s, 4),
        "learning_s": round(time.learning_s, 4),
        "decode_parts_s": {part: round(seconds, 4) for part, seconds in time.decode.parts.items()},
        "parts_s": {part: round(seconds, 4) for part, seconds in time.parts.items()},
        "rows_at_once": time.decode.rows,
        "tokens_per_micro_batch": planned.work.tokens_per_micro_batch,
        "micro_batches": planned.work.packed.micro_batches,
        "sampled_tokens_per_s": round(sampled_per_s(planned)),
        "bottleneck": name,
        "bottleneck_share": round(share, 3),
        "hint": hint_of(planned),
        "memory_gib": round(memory.total / GIB, 2),
        "memory_needed_gib": round(memory.needed / GIB, 2),
        "memory_parts_gib": {part: round(value / GIB, 3) for part, value in memory.parts.items()},
        "memory_usable_gib": round(planned.room / GIB, 2),
        "fits": planned.fits,
        "fits_with": change.settings if change else None,
        "fits_on_gpus": gpus_that_fit(planned),
        "steps": steps,
        "hours": round(time.total_s * steps / 3600, 3),
        "cost": None if price is None else round(cost_of(planned, price, steps), 2),
        "calibration": efficiency_of(planned.device).origin,
    }


def _print(console: Console, name: str, planned: RunEstimate, steps: int, price: float | None) -> None:
    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True)

    work, time, need, whole = planned.work, planned.time, planned.memory, planned.device.memory_gib
    trained = "all weights" if work.method == "full" else f"{work.method} of rank {work.lora_rank}"
    size = planned.shape.parameters
    line(
        f"{name}: {f'{size / 1e9:.2f} B' if size >= 1e9 else f'{size / 1e6:.0f} M'} weights, {trained}, "
        f"on {work.gpus} × {planned.device.name}; "
        f"{work.problems} × {work.group_size} rollouts of {work.prompt_tokens} + {work.completion} tokens"
    )
    times = [(part, duration_text(seconds)) for part, seconds in time.parts.items() if seconds]
    memory = [(part.replace("_", " "), f"{value / GIB:.2f} GiB") for part, value in need.parts.items() if value]
    if not need.gradients:  # of a single micro-batch
        memory.insert(1, ("gradients", "where activations were"))
    times.append(("total", duration_text(time.total_s)))
    memory.append(("total", f"{need.total / GIB:.1f} of {whole:.1f} GiB"))
    table = Table("time of a step", "", "memory of a GPU at its peak", "", box=None, header_style="bold")
    table.columns[1].justify = table.columns[3].justify = "right"
    for left, right in zip_longest(times, memory, fillvalue=("", "")):
        table.add_row(*left, *right)
    console.print(table)
    cost = "" if price is None else f" and cost {cost_of(planned, price, steps):,.2f}"
    line(
        f"{sampled_per_s(planned):,.0f} sampled tokens/s, {time.decode.rows} rows at once on a GPU, "
        f"micro-batches of up to {work.tokens_per_micro_batch:,} tokens; {steps:,} steps take "
        f"{duration_text(time.total_s * steps)}{cost}"
    )
    (part, share), total = planned.bottleneck, sum(time.parts.values())
    inside = sorted(time.decode.parts.items(), key=lambda item: -item[1]) if part == "decode" else []
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in inside if seconds / total >= 0.005)
    line(f"bottleneck: {part}, {share:.0%} of a step{f' ({shares})' if shares else ''}; what helps: {hint_of(planned)}")
    needed = f"{need.needed / GIB:.1f} GiB are needed, {need.needed / GIB / whole:.0%} of the memory"
    if planned.fits:
        rest = "; the KV cache takes some of the rest" if need.kv > need.kv_least else ""
        line(f"it fits: {needed}{rest}", "green")
    else:
        change = changes_that_fit(planned)
        then = f"; a step then takes {duration_text(planned.with_work(change.work).time.total_s)}" if change else ""
        line(f"it does not fit: {needed}, and {PLANNED:.0%} can be planned with; {planned.remedy()}{then}", "yellow")
    line(f"by efficiencies {efficiency_of(planned.device).origin}", "dim")
