"""The page that `palestra env process` writes: every attempt of every group, to be read in a browser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.files import write_text

_TEMPLATE = Path(__file__).with_name("process_page.html")


def write_page(path: Path, environment: str, model: str, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write the page for the records of a process JSONL file."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters["plain"] = lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = page.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        environment=environment, model=model, groups=[_group(record) for record in records]
    )
    write_text(path, text)
    return path


def _group(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record by attempts instead of by columns; what all attempts begin with is told once."""
    opening = next((i for i, m in enumerate(record["messages"][0]) if m["role"] == "assistant"), None)
    columns = ("scores", "passed", "verdicts", "messages", "stops", "errors", "seconds")
    attempts = [dict(zip(columns, row, strict=True)) for row in zip(*(record[key] for key in columns), strict=True)]
    for attempt in attempts:
        attempt["messages"] = attempt["messages"][opening:]
    return {
        "id": record["problem_id"],
        "expect": record["expect"],
        "opening": record["messages"][0][:opening],
        "attempts": attempts,
    }
