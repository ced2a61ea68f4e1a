"""A rollout or a group as one file of HTML, without script, to be attached to an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.report.write import fill_template

_TEMPLATE = Path(__file__).with_name("export_page.html")
# control characters, marks of direction and characters of no width: they change what is seen without being seen
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def rollout_page(run: str, rollout: Mapping[str, Any]) -> str:
    title = f"rollout {rollout['id']} of {run}"
    return _page(title, [rollout], rollout["problem_id"], rollout["step"], rollout["kind"])


def group_page(run: str, group: Mapping[str, Any]) -> str:
    title = f"group {group['id']} of {run}"
    return _page(title, group["rollouts"], group["problem_id"], group["step"], group["kind"])


def reveal(text: Any) -> str:
    """Text in which hidden characters are written out.

    >>> reveal("a\\u202eb")
    'a\\\\u202eb'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def _page(title: str, rollouts: list[Mapping[str, Any]], problem: str, step: int, kind: str) -> str:
    values = {"title": title, "rollouts": rollouts, "problem": problem, "step": step, "kind": kind}
    return fill_template(_TEMPLATE, {"reveal": reveal}, values)
