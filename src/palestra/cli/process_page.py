"""The page that `palestra env process` writes: every attempt of every group, to be read in a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.files import write_text
from palestra.evals.run_report.write import fill_template

_TEMPLATE = Path(__file__).with_name("process_page.html")


def write_page(path: Path, environment: str, model: str, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write the page for the records of a process JSONL file."""
    values = {"environment": environment, "model": model, "groups": [_group(record) for record in records]}
    write_text(path, fill_template(_TEMPLATE, {}, values))
    return path


def _group(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record by attempts instead of by columns; the shared opening is shown once."""
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
