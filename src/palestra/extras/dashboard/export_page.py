"""A rollout, a group or a whole run as one HTML file without script, to open anywhere or attach to an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.run_folder import RunFolder
from palestra.evals.run_report.charts import curves_svg
from palestra.evals.run_report.write import fill_template
from palestra.extras.dashboard import transcripts
from palestra.extras.dashboard.rollout_index import RolloutIndex

MAX_GROUPS = 50  # of the page of a run, unless asked otherwise
_TEMPLATE = Path(__file__).with_name("export_page.html")
# control characters, marks of direction and characters of no width: they change what is seen without being seen
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def record_page(kind: str, run: str, record: Mapping[str, Any]) -> str:
    """The page of a rollout or a group, by its `kind`."""
    return _page(f"{kind} {record['id']} of {run}", [{"rollouts": [record], **record}])


def page_of_run(folder: RunFolder, groups: int | None = None) -> str:
    """The evaluation, the curves, and up to `groups` groups from all of training, with signal where possible."""
    index = RolloutIndex(folder)
    index.update()
    # One group out of each of `count` equal parts: the first whose rewards differ, since GRPO learned from it.
    rows = index.query(
        "SELECT group_id, min(reward) < max(reward) FROM rollouts WHERE kind = 'train' GROUP BY group_id ORDER BY 1"
    )
    count = min(MAX_GROUPS if groups is None else groups, len(rows))
    parts = (rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count))
    shown = [transcripts.group(index, max(part, key=lambda row: row[1])[0]) for part in parts]
    report = folder.report() or {}
    steps = folder.metrics()
    curves = {name: [(row["step"], row[name]) for row in steps if name in row] for name in ("reward_mean", "pass_rate")}
    charts = [curves_svg({name: line}, name, percent=name == "pass_rate") for name, line in curves.items() if line]
    changes = [row for row in report.get("changes") or () if {"name", "before", "after"} <= set(row)]
    changes = changes if len(changes) > 2 else changes[:1]  # with a single measure, "all measures" is the same again
    findings = [row for row in report.get("findings") or () if "sentence" in row]
    about = {"steps": len(steps), "total": len(rows), "changes": changes, "findings": findings, "charts": charts}
    return _page(folder.path.name, shown, about)


def reveal(text: Any) -> str:
    """Text in which hidden characters are written out.

    >>> reveal("a\\u202eb")
    'a\\\\u202eb'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def _page(title: str, groups: Sequence[Mapping[str, Any]], about: Mapping[str, Any] | None = None) -> str:
    from markupsafe import Markup

    if about is not None:
        about = {**about, "charts": [Markup(chart) for chart in about["charts"]]}  # made here, its texts escaped
    return fill_template(_TEMPLATE, {"reveal": reveal}, {"title": title, "groups": groups, "about": about})
