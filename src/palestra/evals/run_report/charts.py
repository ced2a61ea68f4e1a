"""Charts as SVG text.

`curve` and `bars` are parts of a page, whose style sheet sets colours and fonts by class. `curves_svg`
is a file of its own, with a style for light and dark. `fragment` holds parts of a page for
notebooks: they keep to the notebook's colours, and their style ends at their own element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from palestra.core.text import visible

Point = tuple[float, float]

_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")
_CURVES_STYLE = """
svg{background:#fff}text{font:13px system-ui,sans-serif;fill:#222}.tick{fill:#777}.title{font-weight:600}
.grid{stroke:#e5e7eb;fill:none}polyline{fill:none;stroke-width:2.5;stroke-linejoin:round}.raw{stroke-width:1;opacity:.35}
@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#eee}.tick{fill:#999}.grid{stroke:#333}}
"""
_NOTEBOOK_STYLE = """
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


@dataclass(frozen=True)
class Marker:
    """A value with its interval, such as an evaluation at a step."""

    x: float
    value: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Frame:
    """The plotting area of a chart, and the ranges it shows."""

    x_max: float
    y_min: float
    y_max: float
    width: int = 560
    height: int = 280
    left: int = 46
    right: int = 16
    top: int = 14
    bottom: int = 34

    def x(self, value: float) -> float:
        return self.left + (self.width - self.left - self.right) * value / max(self.x_max, 1e-9)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / max(self.y_max - self.y_min, 1e-9)
        return self.height - self.bottom - (self.height - self.top - self.bottom) * share


def smooth(values: Sequence[float], window: int | None = None) -> list[float]:
    """A centred moving average; at the ends over fewer values.

    >>> smooth([0.0, 0.0, 3.0, 0.0, 0.0], window=3)
    [0.0, 1.0, 1.0, 1.0, 0.0]
    """
    half = (window if window is not None else max(3, len(values) // 8)) // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def curve(points: Sequence[Point], *, percent: bool, markers: Sequence[Marker] = (), title: str) -> str:
    """One curve over steps, raw and smoothed, with markers and their intervals on top."""
    low, high = (0.0, 1.0) if percent else _value_range([y for _, y in points])
    frame = Frame(max([x for x, _ in points] + [m.x for m in markers], default=1.0), low, high)
    parts = [_grid(frame, percent)]
    if points:
        smoothed = list(zip([x for x, _ in points], smooth([y for _, y in points]), strict=True))
        line, floor = _path(frame, smoothed), f"{frame.height - frame.bottom:.1f}"
        first, last = frame.x(points[0][0]), frame.x(points[-1][0])
        parts.append(f'<polygon class="area" points="{first:.1f},{floor} {line} {last:.1f},{floor}"/>')
        parts.append(f'<polyline class="line raw" points="{_path(frame, points)}"/>')
        parts.append(f'<polyline class="line smooth" points="{line}"/>')
    for marker in markers:
        x, low, high = frame.x(marker.x), frame.y(marker.low), frame.y(marker.high)
        stem = f"M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8"
        parts.append(
            f'<g class="marker"><title>{escape(marker.label)}</title><path class="stem" d="{stem}"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{frame.y(marker.value):.1f}" r="5"/></g>'
        )
    return _svg(frame.width, frame.height, title, parts)


def bars(groups: Iterable[tuple[str, Mapping[str, Mapping[str, float]]]], *, title: str) -> str:
    """Horizontal bars, one group under each name: of each kind ("before", "after") a rate in 0..1, low and high."""
    left, right, thick, gap, head = 0, 140, 22, 6, 26
    width, plot = 1160, 1160 - 140
    parts, top = [], 4
    for name, members in groups:
        parts.append(f'<text class="name" x="{left}" y="{top + 15}">{escape(name)}</text>')
        top += head
        for kind, bar in members.items():
            middle = top + thick / 2
            parts.append(f'<rect class="track" x="{left}" y="{top}" width="{plot}" height="{thick}" rx="4"/>')
            parts.append(
                f'<rect class="bar {kind}" x="{left}" y="{top}" width="{max(plot * bar["rate"], 2):.1f}" '
                f'height="{thick}" rx="4"/>'
            )
            x1, x2 = left + plot * bar["low"], left + plot * bar["high"]
            path = f"M{x1:.1f} {middle - 5}v10M{x1:.1f} {middle}H{x2:.1f}M{x2:.1f} {middle - 5}v10"
            parts.append(f'<path class="whisker-halo" d="{path}"/><path class="whisker" d="{path}"/>')
            parts.append(
                f'<text class="value {kind}" x="{width - right + 14}" y="{middle + 5}">'
                f'{100 * bar["rate"]:.1f} %<tspan class="kind" dx="8">{kind}</tspan></text>'
            )
            top += thick + gap
        top += 12
    return _svg(width, top, title, parts)


def curves_svg(curves: Mapping[str, Sequence[Point]], title: str, *, percent: bool) -> str:
    """Several named curves over steps, raw and smoothed, with a legend below."""
    row, values = 20, [y for points in curves.values() for _, y in points]
    low, high = (0.0, 1.0) if percent else _value_range(values)
    last = max((x for points in curves.values() for x, _ in points), default=1.0)
    frame = Frame(last, low, high, width=720, height=360, top=34)
    parts = [f'<text class="title" x="{frame.left}" y="20">{escape(title)}</text>', _grid(frame, percent)]
    for i, (name, points) in enumerate(curves.items()):
        colour, y = _COLOURS[i % len(_COLOURS)], frame.height + 8 + i * row
        smoothed = list(zip([x for x, _ in points], smooth([y for _, y in points]), strict=True))
        for kind, line in (("raw", points), ("smooth", smoothed)):
            parts.append(f'<polyline class="{kind}" stroke="{colour}" points="{_path(frame, line)}"/>')
        parts.append(f'<rect x="{frame.left}" y="{y - 9}" width="18" height="4" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{frame.left + 26}" y="{y}">{escape(name)}</text>')
    width, height = frame.width, frame.height + 12 + row * len(curves)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(title)}</title><style>{_CURVES_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _grid(frame: Frame, percent: bool) -> str:
    parts = []
    for i in range(5):
        value = frame.y_min + (frame.y_max - frame.y_min) * i / 4
        y = frame.y(value)
        label = f"{value:.0%}" if percent else f"{value:.2f}"
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    every = next(s * 10**e for e in range(12) for s in (1, 2, 5) if frame.x_max / (s * 10**e) <= 6.5)
    for step in range(0, int(frame.x_max) + 1, every):  # at most seven round step numbers
        x, y = frame.x(step), frame.height - frame.bottom + 20
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>')
    return "".join(parts)


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1 if all values lie there, as most rewards do; else their range with a margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    margin = 0.05 * (high - low or 1.0)
    return low - margin, high + margin


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def fragment(*parts: str) -> str:
    """Parts with the style that they share."""
    return f'<div class="palestra"><style>{_NOTEBOOK_STYLE}</style>{"".join(parts)}</div>'


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
