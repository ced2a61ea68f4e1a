"""Rollouts, groups, tokens and problems of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.extras.dashboard import evaluations, transcripts
from palestra.extras.dashboard.answers import answer, whole
from palestra.extras.dashboard.catalog import Catalog
from palestra.extras.dashboard.cheating import reward_hacking
from palestra.extras.dashboard.export_page import MAX_GROUPS, group_page, rollout_page, run_page
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.extras.dashboard.rollout_query import RolloutQuery, facets, find
from palestra.extras.dashboard.transcripts import require_id
from palestra.servers.body import parse
from palestra.servers.http_errors import refuse

_WITHIN_S = 0.4  # of a request, for bringing the index up to date; a thread continues with the rest
_PAGE = 50
_MAX_PAGE = 200
_MAX_TEXT = 1_000_000

Read = Callable[[RolloutIndex, Request], "dict[str, Any] | Response"]


class RolloutRoutes:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._indexing: set[str] = set()
        self._lock = threading.Lock()

    def routes(self) -> list[Route]:
        return [
            Route(f"/api/runs/{{run}}{path}", self._handler(read), methods=["GET"]) for path, read in _READS.items()
        ]

    def _handler(self, read: Read) -> Callable[[Request], Response]:
        def handle(request: Request) -> Response:
            index, share = self._index(request)
            found = read(index, request)
            return found if isinstance(found, Response) else answer({**found, "indexed": share})

        return handle

    def _index(self, request: Request) -> tuple[RolloutIndex, float]:
        """The run's index, and the share of its files that is in it. The first look at a large run does not wait."""
        index = RolloutIndex(self._catalog.get(request.path_params["run"]).folder)
        key = str(index.folder.path)

        def index_rest() -> None:
            try:
                index.update()
            finally:
                with self._lock:
                    self._indexing.discard(key)

        with self._lock:
            busy = key in self._indexing
        share = index.update(within_s=0.0 if busy else _WITHIN_S)
        if share < 1.0 and not busy:
            with self._lock:
                self._indexing.add(key)
            threading.Thread(target=index_rest, name="palestra-index", daemon=True).start()
        return index, share


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


def _export(index: RolloutIndex, request: Request) -> Response:
    """A rollout or a group, by the path, as a file."""
    is_group, name = request.url.path.split("/")[-3] == "groups", index.folder.path.name
    read, page = (transcripts.group, group_page) if is_group else (transcripts.rollout, rollout_page)
    found = read(index, _id(request), max_chars=None)
    return _attachment(page(name, found), f"{'group' if is_group else 'rollout'}-{found['id']}.html")


def _export_run(index: RolloutIndex, request: Request) -> Response:
    groups = whole(request, "groups", MAX_GROUPS, _MAX_PAGE)
    return _attachment(run_page(index, groups), f"{index.folder.path.name}.html")


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
    "/rollouts/{id}/export.html": _export,
    "/groups/{id}": lambda index, request: transcripts.group(index, _id(request)),
    "/groups/{id}/export.html": _export,
    "/export.html": _export_run,
    "/problems": _problems,
    "/problem": lambda index, request: evaluations.problem(
        index, request.query_params.get("id", ""), request.query_params.get("kind") or "train"
    ),
    "/suspicion": lambda index, request: reward_hacking(index),
}
