"""Parts of a page for notebooks: they keep to the notebook's colours, and their style ends at their own element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from palestra.core.show import visible
from palestra.evals.run_report.charts import Point, curve

_STYLE = """
.palestra{font:13px/1.5 system-ui,sans-serif;max-width:60rem}
.palestra table{border-collapse:collapse;margin:.4rem 0}
.palestra td,.palestra th{padding:.15rem 1rem .15rem 0;text-align:left;background:none}
.palestra .soft{opacity:.65}.palestra .warn{color:#b45309}
.palestra .charts{display:flex;flex-wrap:wrap;gap:1rem}.palestra figure{margin:0;flex:1 1 18rem;max-width:26rem}
.palestra svg{display:block;width:100%;height:auto}
.palestra .grid{stroke:currentColor;opacity:.15;fill:none}.palestra .tick{fill:currentColor;opacity:.65;font-size:12px}
.palestra .line{fill:none;stroke:#2563eb;stroke-linejoin:round}.palestra .raw{stroke-width:1.2;opacity:.35}
.palestra .smooth{stroke-width:2.8}.palestra .area{fill:#2563eb;opacity:.08}
.palestra progress{width:16rem;vertical-align:middle;accent-color:#2563eb}
"""


def fragment(*parts: str) -> str:
    """Parts with the style that they share."""
    return f'<div class="palestra"><style>{_STYLE}</style>{"".join(parts)}</div>'


def text(value: Any) -> str:
    """Text of a model, a user or a file, safe in HTML."""
    return escape(visible(str(value)))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are text."""
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{text(head)}</th>' for head in heads)}</tr>{body}</table>" if body else ""


def charts(steps: Sequence[Mapping[str, float]]) -> str:
    """Curves of reward and pass rate over the steps of a run, from two steps on."""
    figures = []
    for key, name in (("reward_mean", "reward"), ("pass_rate", "pass rate (training)")):
        points: list[Point] = [(row["step"], row[key]) for row in steps if key in row and "step" in row]
        if len(points) > 1:
            drawn = curve(points, percent=key == "pass_rate", title=name)
            figures.append(f"<figure>{drawn}<figcaption class=soft>{name}</figcaption></figure>")
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""
