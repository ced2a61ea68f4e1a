"""Small charts as SVG text: curves over steps, and before/after bars with their intervals.

Colours and fonts come from the page's style sheet, by class, so that a chart follows light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Marker:
    """A measured value with its interval, such as an evaluation at a step."""

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
    """The plotting area inside of a chart, and the ranges that it shows."""

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
    """A centred moving average; at the ends it takes what there is.

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
    """A curve over steps: raw faint, smoothed strong; markers with whiskers on top."""
    low, high = (0.0, 1.0) if percent else value_range([y for _, y in points])
    frame = Frame(max([x for x, _ in points] + [m.x for m in markers], default=1.0), low, high)
    parts = [grid(frame, percent)]
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


def _whisker(x1: float, x2: float, y: float) -> str:
    path = f"M{x1:.1f} {y - 5}v10M{x1:.1f} {y}H{x2:.1f}M{x2:.1f} {y - 5}v10"
    return f'<path class="whisker-halo" d="{path}"/><path class="whisker" d="{path}"/>'


def grid(frame: Frame, percent: bool) -> str:
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
    return f'<polyline class="line {kind}" points="{path_of(frame, points)}"/>'


def _area(frame: Frame, points: Sequence[Point]) -> str:
    floor = f"{frame.height - frame.bottom:.1f}"
    first, last = frame.x(points[0][0]), frame.x(points[-1][0])
    return f'<polygon class="area" points="{first:.1f},{floor} {path_of(frame, points)} {last:.1f},{floor}"/>'


def path_of(frame: Frame, points: Sequence[Point]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _marker(frame: Frame, marker: Marker) -> str:
    x, y = frame.x(marker.x), frame.y(marker.value)
    low, high = frame.y(marker.low), frame.y(marker.high)
    return (
        f'<g class="marker"><title>{escape(marker.label)}</title>'
        f'<path class="stem" d="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5"/></g>'
    )


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds all values, with 0 and 1 in it when they are near: rewards mostly live there."""
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
