"""Readable resources of a run: report, metrics, rollouts and log."""

from __future__ import annotations

import json
from pathlib import Path

from palestra.core.errors import NotFoundError, StateError
from palestra.core.files import last_lines, parse_row
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import redact
from palestra.extras.agent_tools.tools import RlTools

JSON, JSON_LINES, TEXT = "application/json", "application/x-ndjson", "text/plain"
KINDS = {
    "report": (JSON, "held-out results before and after, metrics, transcripts; while it runs, the results so far"),
    "metrics": (JSON_LINES, "one line a step"),
    "rollouts": (JSON_LINES, "the latest attempts, one a line: what was said, and how it was scored"),
    "log": (TEXT, "the last lines of the trainer's log"),
}
LATEST_ROLLOUTS = 50
_LOG_LINES = 200
_TAIL_BYTES = 4_000_000
_SCHEME = "palestra://runs/"


def uri_of(run_id: str, kind: str) -> str:
    return f"{_SCHEME}{run_id}/{kind}"


def read_uri(tools: RlTools, uri: str) -> tuple[str, str]:
    """(MIME type, text) of a resource by its address."""
    run_id, _, kind = uri.removeprefix(_SCHEME).partition("/")
    if not uri.startswith(_SCHEME):
        raise NotFoundError(f"there is no resource {uri[:200]!r}; they look like {uri_of('RUN_ID', 'report')}")
    return read_resource(tools, run_id, kind)


def read_resource(tools: RlTools, run_id: str, kind: str) -> tuple[str, str]:
    """(MIME type, text) of one kind for one run."""
    if kind not in KINDS:
        raise NotFoundError(f"there is no {kind[:100]!r} of a run; expected one of {', '.join(KINDS)}")
    results = tools.rl_get_results(run_id)
    if "run_id" not in results:
        raise StateError(results["error"])
    folder = RunFolder(tools.manager.get(run_id).folder)
    match kind:
        case "report":
            text = _read(folder.report_file) or json.dumps(results, indent=1)
        case "metrics":
            text = _read(folder.metrics_file)
        case "rollouts":
            lines = last_lines(folder.rollouts_file, LATEST_ROLLOUTS + 1, _TAIL_BYTES)
            # not cut at its start by the tail, nor at its end because it is being written
            whole = [line for line in lines if parse_row(line.encode()) is not None]
            text = "".join(f"{line}\n" for line in whole[-LATEST_ROLLOUTS:])
        case _:
            text = "\n".join(tools.manager.logs(run_id, "trainer", _LOG_LINES))
    return KINDS[kind][0], redact(text)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
