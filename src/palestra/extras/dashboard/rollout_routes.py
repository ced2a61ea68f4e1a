"""Rollouts, groups, tokens and problems of a run: filters, full-text search, sorting, pages by where the last ended."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core.errors import InputError, PalestraError, SettingError
from palestra.extras.dashboard import evaluations, transcripts
from palestra.extras.dashboard.answers import answer, whole
from palestra.extras.dashboard.catalog import Catalog
from palestra.extras.dashboard.rollout_index import ADVANTAGE, RolloutIndex
from palestra.extras.dashboard.rollout_row import search_text, shown, snippet
from palestra.extras.dashboard.transcripts import MAX_GROUPS, page_of_run, record_page, require_id
from palestra.servers.web import parse, refuse

_SORTS = {
    "newest": ("id", "DESC"),
    "oldest": ("id", "ASC"),
    "reward": ("reward", "ASC"),
    "-reward": ("reward", "DESC"),
    "advantage": (ADVANTAGE, "ASC"),
    "-advantage": (ADVANTAGE, "DESC"),
    "tokens": ("sampled_tokens", "ASC"),
    "-tokens": ("sampled_tokens", "DESC"),
}
_WORD = re.compile(r'"([^"]+)"|(\S+)')


_MAX_PAGE = 200
_Step = Annotated[int, Field(gt=-(2**63), lt=2**63)]  # as large as SQLite takes


class RolloutQuery(BaseModel):
    """The filters of a query; None: any."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    kind: str = "train"
    step: _Step | None = None
    step_from: _Step | None = None
    step_to: _Step | None = None
    problem: str | None = None
    stop: str | None = None
    tool: str | None = None
    passed: bool | None = None
    error: bool | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    measure: str | None = None
    measure_passed: bool | None = None
    q: Annotated[str, AfterValidator(lambda text: text[:500])] = ""
    sort: str = "newest"
    limit: Annotated[int, AfterValidator(lambda limit: max(1, min(limit, _MAX_PAGE)))] = 50
    cursor: str | None = None

    def where(self) -> tuple[list[str], list[Any]]:
        """Conditions of SQL and their values."""
        asked = [
            ("kind = ?", self.kind),
            ("step = ?", self.step),
            ("step >= ?", self.step_from),
            ("step <= ?", self.step_to),
            ("problem_id = ?", self.problem),
            ("stop = ?", self.stop),
            ("instr(tools, ?) > 0", None if self.tool is None else json.dumps(self.tool, ensure_ascii=False)),
            ("passed = ?", self.passed),
            ("(error IS NOT NULL) = ?", self.error),
            ("reward >= ?", self.reward_min),
            ("reward <= ?", self.reward_max),
            ("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)", match(self.q)),
        ]
        if self.measure is not None and self.measure_passed is not None:
            place = '$."' + self.measure.replace('"', "") + '".passed'
            asked += [(f"json_extract(scores, ?) = {int(self.measure_passed)}", place)]
        used = [(condition, value) for condition, value in asked if value is not None]
        return [condition for condition, _ in used], [value for _, value in used]


def match(text: str) -> str | None:
    """A search text as a query of FTS5: every word must occur, "a phrase" exactly, prefix* as a prefix.

    >>> match('git "rm -rf" clon*')
    '"git" "rm -rf" "clon"*'
    """
    terms = [
        f'"{phrase or word.rstrip("*")}"' + ("*" if word.endswith("*") else "") for phrase, word in _WORD.findall(text)
    ]
    terms = [term.replace('""', '"') for term in terms if term.strip('"*')]
    return " ".join(terms) or None


def find(index: RolloutIndex, query: RolloutQuery) -> dict[str, Any]:
    """A page of rows, the cursor of the next one, and how many there are in all."""
    if query.sort not in _SORTS:
        raise SettingError(f"sort={query.sort[:40]!r} is unknown; expected one of {', '.join(_SORTS)}")
    column, direction = _SORTS[query.sort]
    conditions, values = query.where()
    with index.open() as db:
        try:
            count = db.execute(f"SELECT count(*) FROM rollouts WHERE {' AND '.join(conditions)}", values).fetchone()[0]
            if query.cursor:
                conditions.append(f"({column}, id) {'<' if direction == 'DESC' else '>'} (?, ?)")
                values += _last_place(query.cursor)
            if column == "id":  # by the id, and not by an index of the kind, all of which would have to be sorted
                conditions = [condition.replace("kind =", "+kind =") for condition in conditions]
            rows = db.execute(
                f"SELECT *, {column} AS place FROM rollouts WHERE {' AND '.join(conditions)} "
                f"ORDER BY {column} {direction}, id {direction} LIMIT ?",
                [*values, query.limit + 1],
            ).fetchall()
        except sqlite3.OperationalError as error:
            raise InputError(f"the search {query.q[:80]!r} cannot be understood ({error}); use plain words") from None
    page = rows[: query.limit]
    following = json.dumps([page[-1]["place"], page[-1]["id"]]) if len(rows) > len(page) and page else None
    rollouts = [shown(row) for row in page]
    if words := [phrase or word.rstrip("*") for phrase, word in _WORD.findall(query.q)]:
        for row, rollout in zip(page, rollouts, strict=True):
            try:
                rollout["snippet"] = snippet(search_text(index.record(row)), words)
            except PalestraError:  # its line has just been dropped
                rollout["snippet"] = []
    return {"rollouts": rollouts, "next": following, "count": count}


def _last_place(cursor: str) -> tuple[float, int]:
    """The sorted column and the id of the last row of the page before."""
    try:
        value, last_id = json.loads(cursor)
        if type(last_id) is not int or type(value) not in (int, float) or max(abs(value), abs(last_id)) >= 2**63:
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise SettingError(f"cursor={cursor[:40]!r} is not one that an answer gave as `next`") from None
    return value, last_id


def facets(index: RolloutIndex) -> dict[str, Any]:
    """Values to filter by, with counts."""
    kinds, stops, tools = Counter[str](), Counter[str](), Counter[str]()
    steps: list[int] = []
    errors = 0
    with index.open() as db:
        # one scan of the rollouts: a large run has gigabytes of them
        groups = db.execute(
            "SELECT kind, stop, tools, error IS NOT NULL, count(*), min(step), max(step) "
            "FROM rollouts GROUP BY 1, 2, 3, 4"
        )
        for kind, stop, names, failed, count, *ranges in groups:
            kinds[kind] += count
            stops[stop] += count
            for tool in set(json.loads(names)):
                tools[tool] += count
            if kind == "train":
                errors += count if failed else 0
                steps += ranges
        measures: dict[str, None] = {}
        for (text,) in db.execute("SELECT scores FROM rollouts GROUP BY kind, step"):
            measures |= dict.fromkeys(json.loads(text))
    return {
        "kinds": dict(kinds),
        "steps": [min(steps, default=None), max(steps, default=None)],
        "stops": dict(stops),
        "tools": dict(tools.most_common(100)),
        "measures": list(measures),
        "errors": errors,
    }


_WITHIN_S = 0.4  # of a request, for bringing the index up to date; a thread continues with the rest
_PAGE = 50
_MAX_TEXT = 1_000_000

Read = Callable[[RolloutIndex, Request], "dict[str, Any] | Response"]


def rollout_routes(catalog: Catalog) -> list[Route]:
    """The routes of `_READS`. Each answer says which share of the run's files is indexed."""
    indexing: set[str] = set()  # by threads
    lock = threading.Lock()

    def bring_up_to_date(index: RolloutIndex) -> float:
        """The first look at a large run does not wait: a thread continues."""
        key = str(index.folder.path)

        def index_rest() -> None:
            try:
                index.update()
            finally:
                with lock:
                    indexing.discard(key)

        with lock:
            busy = key in indexing
        share = index.update(within_s=0.0 if busy else _WITHIN_S)
        if share < 1.0 and not busy:
            with lock:
                indexing.add(key)
            threading.Thread(target=index_rest, name="palestra-index", daemon=True).start()
        return share

    def route(path: str, read: Read) -> Route:
        def handle(request: Request) -> Response:
            index = RolloutIndex(catalog.get(request.path_params["run"]).folder)
            share = bring_up_to_date(index)
            result = read(index, request)
            return result if isinstance(result, Response) else answer({**result, "indexed": share})

        return Route(f"/api/runs/{{run}}{path}", handle, methods=["GET"])

    return [route(path, read) for path, read in _READS.items()]


def _rollouts(index: RolloutIndex, request: Request) -> dict[str, Any]:
    asked, known = request.query_params, RolloutQuery.model_fields
    if unknown := sorted(set(asked) - set(known)):
        raise refuse(400, f"unknown parameter {unknown[0][:40]!r}; known are {', '.join(sorted(known))}")
    return find(index, parse(RolloutQuery.model_validate, {name: text for name, text in asked.items() if text}, 400))


def _message(index: RolloutIndex, request: Request) -> dict[str, Any]:
    number = require_id(request.path_params["message"])
    start, limit = whole(request, "start", 0, 10**12), whole(request, "limit", 200_000, _MAX_TEXT)
    return transcripts.message_text(index, _id(request), number, start, limit)


def _tokens(index: RolloutIndex, request: Request) -> dict[str, Any]:
    start, limit = whole(request, "start", 0, 10**12), whole(request, "limit", 5000, transcripts.MAX_TOKENS)
    return transcripts.tokens(index, _id(request), start, limit)


def _problems(index: RolloutIndex, request: Request) -> dict[str, Any]:
    sort, start = request.query_params.get("sort") or "flips", whole(request, "cursor", 0, 10**9)
    return evaluations.problems(index, sort, whole(request, "limit", _PAGE, _MAX_PAGE) or _PAGE, start)


def _export(kind: str, read: Callable[..., Any], index: RolloutIndex, request: Request) -> Response:
    record = read(index, _id(request), max_chars=None)
    return _attachment(record_page(kind, index.folder.path.name, record), f"{kind}-{record['id']}.html")


def _export_run(index: RolloutIndex, request: Request) -> Response:
    groups = whole(request, "groups", MAX_GROUPS, _MAX_PAGE)
    return _attachment(page_of_run(index.folder, groups), f"{index.folder.path.name}.html")


def _id(request: Request) -> int:
    return require_id(request.path_params["id"])


def _attachment(page: str, name: str) -> Response:
    # a page that is opened from the disk has its own policy; here nothing of it may run
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
    }
    return Response(page.encode("utf-8", "replace"), media_type="text/html", headers=headers)


_READS: dict[str, Read] = {
    "/rollouts": _rollouts,
    "/facets": lambda index, request: facets(index),
    "/rollouts/{id}": lambda index, request: transcripts.rollout(index, _id(request)),
    "/rollouts/{id}/messages/{message}": _message,
    "/rollouts/{id}/tokens": _tokens,
    "/rollouts/{id}/export.html": partial(_export, "rollout", transcripts.rollout),
    "/groups/{id}": lambda index, request: transcripts.group(index, _id(request)),
    "/groups/{id}/export.html": partial(_export, "group", transcripts.group),
    "/export.html": _export_run,
    "/problems": _problems,
    "/problem": lambda index, request: evaluations.problem(
        index, request.query_params.get("id", ""), request.query_params.get("kind") or "train"
    ),
}
