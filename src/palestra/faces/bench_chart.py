"""The chart of `palestra bench`: one SVG that stands alone, in light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from palestra.bench.workload import Results, Side

_LEFT, _PANEL, _GAP, _VALUE = 100, 300, 40, 90
_WIDTH = _LEFT + 2 * _PANEL + _GAP + 20
_THICK, _STEP, _HEAD = 22, 28, 56
_STYLE = """
svg{background:#fff}
text{font:14px system-ui,sans-serif;fill:#222}.title,.name{font-weight:600}.head{fill:#777}
.bar{fill:#b4bac4}.engine{fill:#2563eb}
@media(prefers-color-scheme:dark){svg{background:#111}
text{fill:#eee}.head{fill:#999}.bar{fill:#5b6472}.engine{fill:#60a5fa}}
"""


def chart(results: Results, title: str) -> str:
    """Tokens a second and tokens computed: a group of bars for each scenario, a bar for each side."""
    parts = [f'<text class="title" x="0" y="18">{escape(title)}</text>']
    top = 34
    for name, sides in results.items():
        parts.append(f'<text class="name" x="0" y="{top + 18}">{escape(name)}</text>')
        parts += [f'<text x="0" y="{top + _HEAD + i * _STEP + 16}">{side}</text>' for i, side in enumerate(sides)]
        speeds = {side: m.tokens_per_s for side, m in sides.items()}
        computed = {side: float(m.computed_tokens) for side, m in sides.items()}
        parts += _panel(_LEFT, top, "tokens/s (longer is better)", speeds)
        parts += _panel(_LEFT + _PANEL + _GAP, top, "tokens computed (shorter is better)", computed)
        top += _HEAD + _STEP * len(sides) + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        f'role="img"><title>{escape(title)}</title><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _panel(left: int, top: int, heading: str, values: Mapping[Side, float]) -> list[str]:
    """Bars from `left` on, the longest as long as its value's text leaves room for."""
    parts = [f'<text class="head" x="{left}" y="{top + 42}">{escape(heading)}</text>']
    for i, (side, value) in enumerate(values.items()):
        y = top + _HEAD + i * _STEP
        width = max(2.0, (_PANEL - _VALUE) * value / max(values.values()))
        parts.append(
            f'<rect class="bar {side}" x="{left}" y="{y}" width="{width:.1f}" height="{_THICK}" rx="4"/>'
            f'<text x="{left + width + 8:.1f}" y="{y + 16}">{value:,.0f}</text>'
        )
    return parts
