"""The list of runs, one run, its metrics and its logs: read, and followed live."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core.errors import NotFoundError
from palestra.core.files import read_from
from palestra.core.secrets import redact
from palestra.extras.dashboard.answers import Event, answer, events, number, paged, whole
from palestra.extras.dashboard.catalog import (
    Catalog,
    CatalogRun,
    by_step,
    charts,
    columns,
    details,
    findings,
    read_rows,
    summary,
)
from palestra.extras.dashboard.evaluations import evaluations, suspicion
from palestra.runs.reader import tail

_LIST_EVERY_S = 2.0
_RUN_EVERY_S = 0.7
_PAGE = 50
_LOG_LINES = 200
_MAX_LOG_LINES = 5000
_BLOCK = 1 << 20  # bytes of one read of a log


class RunRoutes:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def routes(self) -> list[Route]:
        reads = {
            "": _one,
            "/metrics": _metrics,
            "/logs": _logs,
            "/evaluations": lambda e, _: evaluations(e.folder),
            "/suspicion": lambda e, _: suspicion(e.folder),
        }
        streams = {
            "/events": lambda e, _: self._run_events(e.id),
            "/logs/events": lambda e, request: self._log_events(e.id, _log(e, request)[1]),
        }

        def route(path: str, respond: Callable[[Any], Response], handle: Callable[[CatalogRun, Request], Any]) -> Route:
            def handler(request: Request) -> Response:
                return respond(handle(self._catalog.get(request.path_params["run"]), request))

            return Route(f"/api/runs/{{run}}{path}", handler)

        return [
            Route("/api/runs", self.list),
            Route("/api/runs/events", lambda request: events(self._list_events())),
            *(route(path, answer, read) for path, read in reads.items()),
            *(route(path, events, stream) for path, stream in streams.items()),
        ]

    def list(self, request: Request) -> Response:
        words = request.query_params.get("q", "").lower().split()
        state = request.query_params.get("state") or None
        start, limit = whole(request, "cursor", 0, 10**9), whole(request, "limit", _PAGE, 500) or _PAGE
        matching = [run for run in self._catalog.all() if _matches(run, words) and state in (None, run.run.state)]
        rows = [summary(run) for run in matching[start : start + limit]]
        return answer({"runs": rows, **paged(len(matching), start, limit)})

    async def _list_events(self) -> AsyncIterator[Event]:
        def now() -> dict[str, Any]:
            runs = self._catalog.all()
            return {"runs": [summary(run) for run in runs[:_PAGE]], "total": len(runs)}

        last = None
        while True:
            current = await asyncio.to_thread(now)
            if (seen := [*map(_without_clock, current["runs"]), current["total"]]) != last:
                yield "runs", current
                last = seen
            await asyncio.sleep(_LIST_EVERY_S)

    async def _run_events(self, run_id: str) -> AsyncIterator[Event]:
        position, advice, last = 0, None, None
        while True:
            entry = await asyncio.to_thread(self._catalog.get, run_id)
            current = await asyncio.to_thread(summary, entry)
            path = entry.folder.metrics_file
            if path.is_file() and path.stat().st_size < position:
                position = 0  # the run was resumed, and its records cut back
            rows, after = await asyncio.to_thread(read_rows, path, position)
            if rows or position == 0:
                yield "metrics", {**columns(by_step(rows)), "from_start": position == 0}
                position = after
            if (seen := _without_clock(current)) != last:
                yield "run", current
                last = seen
            if rows or advice is None:
                advice = await asyncio.to_thread(findings, entry)
                yield "findings", {"findings": advice}
                if rows:
                    yield "rollouts", {"step": rows[-1]["step"]}
            if not entry.run.is_active:
                yield "end", {}
                return
            await asyncio.sleep(_RUN_EVERY_S)

    async def _log_events(self, run_id: str, path: Path | None) -> AsyncIterator[Event]:
        if path is None:
            yield "end", {}
            return
        lines, position = await asyncio.to_thread(recent_lines, path, _LOG_LINES)
        yield "lines", {"lines": lines}
        while True:
            active = (await asyncio.to_thread(self._catalog.get, run_id)).run.is_active
            lines, position = await asyncio.to_thread(new_lines, path, position, ended=not active)
            if lines:
                yield "lines", {"lines": lines}
            if not active:
                yield "end", {}
                return
            await asyncio.sleep(_RUN_EVERY_S)


def _one(entry: CatalogRun, request: Request) -> dict[str, Any]:
    return {**summary(entry), **details(entry), "alarms": suspicion(entry.folder)["alarms"]}


def _metrics(entry: CatalogRun, request: Request) -> dict[str, Any]:
    after = number(request, "after", -math.inf)
    made = columns([row for row in by_step(entry.folder.metrics()) if row["step"] > after])
    return {**made, "charts": charts(list(made["series"]))}


def _logs(entry: CatalogRun, request: Request) -> dict[str, Any]:
    part, path = _log(entry, request)
    lines = tail(path, whole(request, "lines", _LOG_LINES, _MAX_LOG_LINES)) if path else []
    return {"part": part, "parts": list(entry.run.logs), "lines": lines}


def _matches(entry: CatalogRun, words: list[str]) -> bool:
    run = entry.run
    text = f"{run.run_id} {run.name} {run.environment} {run.folder} {run.state}".lower()
    return all(word in text for word in words)


def _without_clock(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("seconds", "seconds_left")}


def _log(entry: CatalogRun, request: Request) -> tuple[str | None, Path | None]:
    """The log that is asked for, or the first that the run has."""
    logs, part = entry.run.logs, request.query_params.get("part")
    if part and part not in logs:
        raise NotFoundError(f"the run {entry.id} has no log of {part[:80]!r}; it has {', '.join(logs) or 'none'}")
    name = part or next((name for name, path in logs.items() if path.is_file()), None)
    return name, logs[name] if name else None


def recent_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last whole lines, and where the line after them begins."""
    start = max(0, (path.stat().st_size if path.is_file() else 0) - _BLOCK)
    lines, position = new_lines(path, start)
    return lines[1 if start else 0 :][-count:], position  # the first may have begun before the block


def new_lines(path: Path, position: int, *, ended: bool = False) -> tuple[list[str], int]:
    """The whole lines from a position on, and where the next begins; of a log that has ended, half a line, too."""
    block, position = read_from(path, position, _BLOCK)
    length = len(block) if ended else block.rfind(b"\n") + 1
    text = block[:length].decode("utf-8", "replace").removesuffix("\n")
    return redact(text).split("\n") if length else [], position + length
