"""`palestra bench`: the engine against naive batched sampling and `generate`, on this machine and model."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from palestra.cli.common import load_libraries, plot_option, returns_data_at_end
from palestra.evals.run_report.charts import svg_file
from palestra.extras.bench.workload import SIDES, Results, Workload, check_least
from palestra.train.progress import task

_DEFAULT = Workload()
_COLUMNS = {  # of Measurement -> heading and format of the table, digits in JSON
    "tokens_per_s": ("tokens/s", ",.0f", 1),
    "wall_s": (None, "", 4),
    "cpu_s": ("CPU s", ".2f", 4),
    "prefilled_tokens": ("prefilled", ",", 0),
    "sampled_tokens": ("sampled", ",", 0),
    "computed_tokens": ("computed", ",", 0),
}
_RATIO_NAMES = {"tokens_per_s": "tokens/s", "cpu_s": "fewer CPU seconds", "computed_tokens": "fewer tokens computed"}
_PANELS_STYLE = """
svg{background:#fff}
text{font:14px system-ui,sans-serif;fill:#222}.title,.name{font-weight:600}.head{fill:#777}
.bar{fill:#b4bac4}.highlight{fill:#2563eb}
@media(prefers-color-scheme:dark){svg{background:#111}
text{fill:#eee}.head{fill:#999}.bar{fill:#5b6472}.highlight{fill:#60a5fa}}
"""


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
    load_libraries(console, model)
    from palestra.extras.bench.measure import Bench

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    with task(console, f"loading {model}"):
        bench = Bench(model, work, threads)
    size = f"{work.prompts} prompts of {work.prompt_tokens} tokens × {work.group_size} rollouts"
    size += f", {work.new_tokens} new tokens a turn"
    line(f"{model} on {bench.device}, {bench.threads} thread{'s' * (bench.threads > 1)}: {size}")
    results: Results = {name: {} for name in work.scenarios}
    pairs = [(name, side) for name in work.scenarios for side in SIDES]
    with task(console, "measuring", len(pairs)) as phase:
        for done, (name, side) in enumerate(pairs, 1):
            phase.name = f"{name}: {side}"
            m = results[name][side] = bench.measure(side, work.scenarios[name])
            phase.advance(done)
            if not console.is_terminal:  # which has a table at the end
                line(
                    f"{name}: {side}  {m.tokens_per_s:,.0f} tokens/s  {m.cpu_s:.2f} CPU s  "
                    f"{m.computed_tokens:,} tokens computed ({m.prefilled_tokens:,} prefilled + "
                    f"{m.sampled_tokens:,} sampled)"
                )
    if console.is_terminal:
        console.print(_table(results))
    for name, sides in results.items():
        for other in SIDES[1:]:
            ratios = sides["engine"].ratios_to(sides[other])
            shown = ", ".join(f"{ratios[key]:.2f} × {label}" for key, label in _RATIO_NAMES.items())
            line(f"{name}: engine against {other}: {shown}")
    if plot is not None:
        bars = {
            name: {
                "tokens/s (longer is better)": {side: m.tokens_per_s for side, m in sides.items()},
                "tokens computed (shorter is better)": {side: float(m.computed_tokens) for side, m in sides.items()},
            }
            for name, sides in results.items()
        }
        chart = bar_panels_svg(bars, f"{model}: {size}, on {bench.device}", highlight="engine")
        plot.write_text(chart, encoding="utf-8")
        line(f"chart {plot}")
    where = {"model": model, "device": bench.device, "threads": bench.threads, "workload": sizes}
    return where | {"scenarios": _scenarios(results)}


def _table(results: Results) -> Table:
    table = Table("scenario", "side")
    columns = {key: (heading, form) for key, (heading, form, _) in _COLUMNS.items() if heading}
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, sides in results.items():
        for side, measured in sides.items():
            table.add_row(
                name if side == SIDES[0] else "",
                side,
                *[f"{getattr(measured, key):{form}}" for key, (_, form) in columns.items()],
                style="bold" if side == "engine" else None,
                end_section=side == SIDES[-1],
            )
    return table


def _scenarios(results: Results) -> dict[str, dict[str, Any]]:
    """The numbers for JSON, with the ratios of the engine to the other sides."""
    scenarios: dict[str, dict[str, Any]] = {name: {} for name in results}
    for name, sides in results.items():
        for side, measured in sides.items():
            scenarios[name][side] = {key: round(getattr(measured, key), n) for key, (*_, n) in _COLUMNS.items()}
        for other in SIDES[1:]:
            ratios = sides["engine"].ratios_to(sides[other])
            scenarios[name][f"engine_to_{other}"] = {key: round(ratio, 3) for key, ratio in ratios.items()}
    return scenarios


def bar_panels_svg(groups: Mapping[str, Mapping[str, Mapping[Any, float]]], title: str, *, highlight: str) -> str:
    """Groups of bars, group -> heading of a panel -> label of a bar -> value; panels of a group stand side by side.

    Bars of the label `highlight` stand out.
    """
    left, panel_width, gap, row, head = 100, 300, 40, 28, 56
    parts, top, columns = [f'<text class="title" x="0" y="18">{escape(title)}</text>'], 34, 1
    for name, panels in groups.items():
        labels = list(next(iter(panels.values())))
        parts.append(f'<text class="name" x="0" y="{top + 18}">{escape(name)}</text>')
        parts += [
            f'<text x="0" y="{top + head + i * row + 16}">{escape(label)}</text>' for i, label in enumerate(labels)
        ]
        for column, (heading, values) in enumerate(panels.items()):
            x = left + column * (panel_width + gap)
            parts.append(f'<text class="head" x="{x}" y="{top + 42}">{escape(heading)}</text>')
            longest = max(values.values())
            for i, (label, value) in enumerate(values.items()):  # the longest leaves room for its value
                y, length = top + head + i * row, max(2.0, (panel_width - 90) * value / longest)
                kind = "bar highlight" if label == highlight else "bar"
                parts.append(
                    f'<rect class="{kind}" x="{x}" y="{y}" width="{length:.1f}" height="22" rx="4"/>'
                    f'<text x="{x + length + 8:.1f}" y="{y + 16}">{value:,.0f}</text>'
                )
        columns = max(columns, len(panels))
        top += head + row * len(labels) + 14
    width = left + columns * panel_width + (columns - 1) * gap + 20
    return svg_file(width, top, title, _PANELS_STYLE, parts)
