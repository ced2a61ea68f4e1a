"""The chart of `palestra runs compare`: the curves of several runs in one SVG that stands alone, in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from palestra.faces.charts import Frame, Point, grid, path_of, smooth, value_range

_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")
_STYLE = """
svg{background:#fff}text{font:13px system-ui,sans-serif;fill:#222}.tick{fill:#777}.title{font-weight:600}
.grid{stroke:#e5e7eb;fill:none}polyline{fill:none;stroke-width:2.5;stroke-linejoin:round}.raw{stroke-width:1;opacity:.35}
@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#eee}.tick{fill:#999}.grid{stroke:#333}}
"""
_ROW, _HEAD = 20, 34


def chart(curves: Mapping[str, Sequence[Point]], title: str, *, percent: bool) -> str:
    """Each run's curve over its steps: what was measured faint, smoothed strong; a legend below."""
    values = [y for points in curves.values() for _, y in points]
    low, high = (0.0, 1.0) if percent else value_range(values)
    last = max((x for points in curves.values() for x, _ in points), default=1.0)
    frame = Frame(last, low, high, width=720, height=360, top=_HEAD)
    parts = [f'<text class="title" x="{frame.left}" y="20">{escape(title)}</text>', grid(frame, percent)]
    for i, (name, points) in enumerate(curves.items()):
        colour, y = _COLOURS[i % len(_COLOURS)], frame.height + 8 + i * _ROW
        calm = list(zip([x for x, _ in points], smooth([y for _, y in points]), strict=True))
        for kind, line in (("raw", points), ("smooth", calm)):
            parts.append(f'<polyline class="{kind}" stroke="{colour}" points="{path_of(frame, line)}"/>')
        parts.append(f'<rect x="{frame.left}" y="{y - 9}" width="18" height="4" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{frame.left + 26}" y="{y}">{escape(name)}</text>')
    height = frame.height + 12 + _ROW * len(curves)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {height}" width="{frame.width}" '
        f'height="{height}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )
