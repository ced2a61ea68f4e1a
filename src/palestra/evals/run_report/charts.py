"""Charts as SVG text.

`curve` and `bars` are parts of a page, whose style sheet sets colours and fonts by class. `curves_svg` and
`bar_panels_svg` are files of their own, with a style for light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Point = tuple[float, float]

_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")
_CURVES_STYLE = """
svg{background:#fff}text{font:13px system-ui,sans-serif;fill:#222}.tick{fill:#777}.title{font-weight:600}
.grid{stroke:#e5e7eb;fill:none}polyline{fill:none;stroke-width:2.5;stroke-linejoin:round}.raw{stroke-width:1;opacity:.35}
@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#eee}.tick{fill:#999}.grid{stroke:#333}}
"""
_PANELS_STYLE = """
svg{background:#fff}
text{font:14px system-ui,sans-serif;fill:#222}.title,.name{font-weight:600}.head{fill:#777}
.bar{fill:#b4bac4}.highlight{fill:#2563eb}
@media(prefers-color-scheme:dark){svg{background:#111}
text{fill:#eee}.head{fill:#999}.bar{fill:#5b6472}.highlight{fill:#60a5fa}}
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
class Bar:
    """One bar of a pair: a share in 0..1 with its interval; `kind` is "before" or "after"."""

    kind: str
    rate: float
    low: float
    high: float


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
    out = []
    for i in range(len(values)):
        part = values[max(0, i - half) : i + half + 1]
        out.append(sum(part) / len(part))
    return out


def curve(points: Sequence[Point], *, percent: bool, markers: Sequence[Marker] = (), title: str) -> str:
    """One curve over steps, raw and smoothed, with markers and their intervals on top."""
    low, high = (0.0, 1.0) if percent else _value_range([y for _, y in points])
    frame = Frame(max([x for x, _ in points] + [m.x for m in markers], default=1.0), low, high)
    parts = [_grid(frame, percent)]
    if points:
        smoothed = list(zip([x for x, _ in points], smooth([y for _, y in points]), strict=True))
        parts += [_area(frame, smoothed), _line(frame, points, "raw"), _line(frame, smoothed, "smooth")]
    parts += [_marker(frame, marker) for marker in markers]
    return _svg(frame.width, frame.height, title, parts)


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str) -> str:
    """Horizontal bars, one group under each name, with the interval as a whisker."""
    left, right, thick, gap, head = 0, 140, 22, 6, 26
    width, plot = 1160, 1160 - 140
    parts, top = [], 4
    for name, members in groups:
        parts.append(f'<text class="name" x="{left}" y="{top + 15}">{escape(name)}</text>')
        top += head
        for bar in members:
            middle = top + thick / 2
            parts.append(f'<rect class="track" x="{left}" y="{top}" width="{plot}" height="{thick}" rx="4"/>')
            parts.append(
                f'<rect class="bar {bar.kind}" x="{left}" y="{top}" width="{max(plot * bar.rate, 2):.1f}" '
                f'height="{thick}" rx="4"/>'
            )
            parts.append(_whisker(left + plot * bar.low, left + plot * bar.high, middle))
            parts.append(
                f'<text class="value {bar.kind}" x="{width - right + 14}" y="{middle + 5}">'
                f'{100 * bar.rate:.1f} %<tspan class="kind" dx="8">{bar.kind}</tspan></text>'
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
    return _svg_file(frame.width, frame.height + 12 + row * len(curves), title, _CURVES_STYLE, parts)


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
            parts += _panel_bars(x, top + head, row, panel_width, values, highlight)
        columns = max(columns, len(panels))
        top += head + row * len(labels) + 14
    width = left + columns * panel_width + (columns - 1) * gap + 20
    return _svg_file(width, top, title, _PANELS_STYLE, parts)


def _panel_bars(left: int, top: int, row: int, width: int, values: Mapping[Any, float], highlight: str) -> list[str]:
    """Bars with their values as text; the longest leaves room for its text."""
    parts, longest = [], max(values.values())
    for i, (label, value) in enumerate(values.items()):
        y, length = top + i * row, max(2.0, (width - 90) * value / longest)
        kind = "bar highlight" if label == highlight else "bar"
        parts.append(
            f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="22" rx="4"/>'
            f'<text x="{left + length + 8:.1f}" y="{y + 16}">{value:,.0f}</text>'
        )
    return parts


def _whisker(x1: float, x2: float, y: float) -> str:
    path = f"M{x1:.1f} {y - 5}v10M{x1:.1f} {y}H{x2:.1f}M{x2:.1f} {y - 5}v10"
    return f'<path class="whisker-halo" d="{path}"/><path class="whisker" d="{path}"/>'


def _grid(frame: Frame, percent: bool) -> str:
    parts = []
    for i in range(5):
        value = frame.y_min + (frame.y_max - frame.y_min) * i / 4
        y = frame.y(value)
        label = f"{value:.0%}" if percent else f"{value:.2f}"
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step in _ticks(frame.x_max):
        x, y = frame.x(step), frame.height - frame.bottom + 20
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>')
    return "".join(parts)


def _line(frame: Frame, points: Sequence[Point], kind: str) -> str:
    return f'<polyline class="line {kind}" points="{_path(frame, points)}"/>'


def _area(frame: Frame, points: Sequence[Point]) -> str:
    floor = f"{frame.height - frame.bottom:.1f}"
    first, last = frame.x(points[0][0]), frame.x(points[-1][0])
    return f'<polygon class="area" points="{first:.1f},{floor} {_path(frame, points)} {last:.1f},{floor}"/>'


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _marker(frame: Frame, marker: Marker) -> str:
    x, y = frame.x(marker.x), frame.y(marker.value)
    low, high = frame.y(marker.low), frame.y(marker.high)
    return (
        f'<g class="marker"><title>{escape(marker.label)}</title>'
        f'<path class="stem" d="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5"/></g>'
    )


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1 if all values lie there, as most rewards do; else their range with a margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    margin = 0.05 * (high - low or 1.0)
    return low - margin, high + margin


def _ticks(x_max: float) -> list[int]:
    """At most seven round step numbers."""
    step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if x_max / (s * 10**e) <= 6.5)
    return list(range(0, int(x_max) + 1, step))


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _svg_file(width: int, height: int, title: str, style: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><title>{escape(title)}</title><style>{style}</style>{"".join(parts)}</svg>\n'
    )
