"""`palestra bench`: the engine against naive batched sampling and `generate`, on this machine and model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from palestra.cli.common import load_libraries, plot_option, returns_data_at_end
from palestra.evals.run_report.charts import bar_panels_svg
from palestra.extras.bench.workload import SIDES, Measurement, Results, Side, Workload, check_least
from palestra.train.progress import task

if TYPE_CHECKING:
    from palestra.extras.bench.measure import Bench

_DEFAULT = Workload()
_COLUMNS = {  # heading -> attribute of Measured and its format
    "tokens/s": ("tokens_per_s", ",.0f"),
    "CPU s": ("cpu_s", ".2f"),
    "prefilled": ("prefilled_tokens", ","),
    "sampled": ("sampled_tokens", ","),
    "computed": ("computed_tokens", ","),
}
_DIGITS = {"tokens_per_s": 1, "wall_s": 4, "cpu_s": 4, "prefilled_tokens": 0, "sampled_tokens": 0, "computed_tokens": 0}
_RATIO_NAMES = {"tokens_per_s": "tokens/s", "cpu_s": "fewer CPU seconds", "computed_tokens": "fewer tokens computed"}


@click.command("bench", context_settings={"max_content_width": 100})
@click.option("--model", default="palestra/tiny", show_default=True, metavar="NAME", help="A hub id or local folder.")
@click.option("--prompts", default=_DEFAULT.prompts, show_default=True, help="Number of different prompts.")
@click.option("--group-size", default=_DEFAULT.group_size, show_default=True, help="Rollouts of each prompt.")
@click.option("--prompt-tokens", default=_DEFAULT.prompt_tokens, show_default=True, help="Length of a prompt.")
@click.option("--new-tokens", default=_DEFAULT.new_tokens, show_default=True, help="Tokens sampled in each turn.")
@click.option("--tool-rounds", default=_DEFAULT.tool_rounds, show_default=True, help="0: only the single turn.")
@click.option("--threads", type=int, metavar="N", help="CPU threads.  [default: as in training]")
@returns_data_at_end
@plot_option("Write a bar chart.")
def command(model: str, threads: int | None, plot: Path | None, console: Console, **sizes: int) -> dict[str, Any]:
    """Measure how fast a model samples here: the engine, naive batched sampling and transformers' generate.

    All three sample the same number of tokens from the same prompts: in a single turn, and in a
    conversation with tool results in between.

    \b
    Examples:
      palestra bench
      palestra bench --model Qwen/Qwen3-0.6B --threads 8 --plot bench.svg
    """
    work = Workload(**sizes)
    work.check()
    if threads is not None:
        check_least("threads", threads, 1)
    bench = _load(console, model, work, threads)
    results = _measure(console, bench, work)
    if console.is_terminal:
        console.print(_table(results))
    _print_ratios(console, results)
    if plot is not None:
        plot.write_text(_chart(results, f"{model}: {_describe(work)}, on {bench.device}"), encoding="utf-8")
        console.print(f"chart {plot}", highlight=False, soft_wrap=True)
    where = {"model": model, "device": bench.device, "threads": bench.threads, "workload": sizes}
    return where | {"scenarios": {name: _summary(sides) for name, sides in results.items()}}


def _load(console: Console, model: str, work: Workload, threads: int | None) -> Bench:
    load_libraries(console, model)
    from palestra.extras.bench.measure import Bench

    with task(console, f"loading {model}"):
        bench = Bench(model, work, threads)
    threads_used = f"{bench.threads} thread{'s' * (bench.threads > 1)}"
    console.print(f"{model} on {bench.device}, {threads_used}: {_describe(work)}", highlight=False, soft_wrap=True)
    return bench


def _describe(work: Workload) -> str:
    size = f"{work.prompts} prompts of {work.prompt_tokens} tokens × {work.group_size} rollouts"
    return f"{size}, {work.new_tokens} new tokens a turn"


def _measure(console: Console, bench: Bench, work: Workload) -> Results:
    """Measure every side of every scenario; without a terminal, which has a table at the end, print a line for each."""
    results: Results = {name: {} for name in work.scenarios}
    pairs = [(name, side) for name in work.scenarios for side in SIDES]
    with task(console, "measuring", len(pairs)) as phase:
        for done, (name, side) in enumerate(pairs, 1):
            phase.name = f"{name}: {side}"
            measured = results[name][side] = bench.measure(side, work.scenarios[name])
            phase.advance(done)
            if not console.is_terminal:
                console.print(f"{name}: " + "  ".join([side, *_cells(measured)]), highlight=False, soft_wrap=True)
    return results


def _cells(measured: Measurement) -> list[str]:
    return [
        f"{measured.tokens_per_s:,.0f} tokens/s",
        f"{measured.cpu_s:.2f} CPU s",
        f"{measured.computed_tokens:,} tokens computed "
        f"({measured.prefilled_tokens:,} prefilled + {measured.sampled_tokens:,} sampled)",
    ]


def _table(results: Results) -> Table:
    table = Table("scenario", "side")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, sides in results.items():
        for side, measured in sides.items():
            table.add_row(
                name if side == SIDES[0] else "",
                side,
                *[f"{getattr(measured, key):{form}}" for key, form in _COLUMNS.values()],
                style="bold" if side == "engine" else None,
                end_section=side == SIDES[-1],
            )
    return table


def _chart(results: Results, title: str) -> str:
    groups = {
        name: {
            "tokens/s (longer is better)": {side: m.tokens_per_s for side, m in sides.items()},
            "tokens computed (shorter is better)": {side: float(m.computed_tokens) for side, m in sides.items()},
        }
        for name, sides in results.items()
    }
    return bar_panels_svg(groups, title, highlight="engine")


def _print_ratios(console: Console, results: Results) -> None:
    for name, sides in results.items():
        for other in SIDES[1:]:
            ratios = sides["engine"].ratios_to(sides[other])
            shown = ", ".join(f"{ratios[key]:.2f} × {label}" for key, label in _RATIO_NAMES.items())
            console.print(f"{name}: engine against {other}: {shown}", highlight=False, soft_wrap=True)


def _summary(sides: Mapping[Side, Measurement]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        side: {key: round(getattr(m, key), digits) for key, digits in _DIGITS.items()} for side, m in sides.items()
    }
    for other in SIDES[1:]:
        ratios = sides["engine"].ratios_to(sides[other])
        rows[f"engine_to_{other}"] = {key: round(ratio, 3) for key, ratio in ratios.items()}
    return rows
