"""Rollouts, groups, tokens and problems of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.dashboard import problems, token_view, transcripts
from palestra.dashboard.answers import answer, whole
from palestra.dashboard.catalog import Catalog
from palestra.dashboard.cheating import suspicion
from palestra.dashboard.rollout_index import RolloutIndex
from palestra.dashboard.rollout_query import RolloutQuery, facets, find
from palestra.dashboard.transcripts import group_page, rollout_page
from palestra.servers.body import parse
from palestra.servers.http_errors import refuse

_WITHIN_S = 0.4  # of a request, for bringing the index up to date; a thread goes on with the rest
_PAGE = 50
_MAX_PAGE = 200
_MAX_TEXT = 1_000_000


class RolloutRoutes:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._indexing: set[str] = set()
        self._lock = threading.Lock()

    def routes(self) -> list[Route]:
        run = "/api/runs/{run}"
        handlers: dict[str, Callable[[Request], Response]] = {
            "/rollouts": self.rollouts,
            "/facets": self.facets,
            "/rollouts/{id}": self.rollout,
            "/rollouts/{id}/messages/{message}": self.message,
            "/rollouts/{id}/tokens": self.tokens,
            "/rollouts/{id}/export.html": self.export_rollout,
            "/groups/{id}": self.group,
            "/groups/{id}/export.html": self.export_group,
            "/problems": self.problems,
            "/problem": self.problem,
            "/suspicion": self.suspicion,
        }
        return [Route(run + path, handler, methods=["GET"]) for path, handler in handlers.items()]

    def rollouts(self, request: Request) -> Response:
        index, share = self.index(request)
        asked, known = request.query_params, RolloutQuery.model_fields
        if unknown := sorted(set(asked) - set(known)):
            raise refuse(400, f"unknown parameter {unknown[0][:40]!r}; known are {', '.join(sorted(known))}")
        query = parse(RolloutQuery.model_validate, {name: text for name, text in asked.items() if text}, 400)
        return answer({**find(index, query), "indexed": share})

    def facets(self, request: Request) -> Response:
        index, share = self.index(request)
        return answer({**facets(index), "indexed": share})

    def rollout(self, request: Request) -> Response:
        index, _ = self.index(request)
        return answer(transcripts.rollout(index, _id(request)))

    def message(self, request: Request) -> Response:
        index, _ = self.index(request)
        number_ = transcripts.require_id(request.path_params["message"])
        start, limit = whole(request, "start", 0, 10**12), whole(request, "limit", 200_000, _MAX_TEXT)
        return answer(transcripts.message_text(index, _id(request), number_, start, limit))

    def tokens(self, request: Request) -> Response:
        index, _ = self.index(request)
        start = whole(request, "start", 0, 10**12)
        return answer(
            token_view.tokens(index, _id(request), start, whole(request, "limit", 5000, token_view.MAX_TOKENS))
        )

    def group(self, request: Request) -> Response:
        index, _ = self.index(request)
        return answer(transcripts.group(index, _id(request)))

    def problems(self, request: Request) -> Response:
        index, share = self.index(request)
        sort, start = request.query_params.get("sort") or "flips", whole(request, "cursor", 0, 10**9)
        found = problems.problems(index, sort, whole(request, "limit", _PAGE, _MAX_PAGE) or _PAGE, start)
        return answer({**found, "indexed": share})

    def problem(self, request: Request) -> Response:
        index, _ = self.index(request)
        asked = request.query_params
        return answer(problems.problem(index, asked.get("id", ""), asked.get("kind") or "train"))

    def suspicion(self, request: Request) -> Response:
        index, share = self.index(request)
        return answer({**suspicion(index), "indexed": share})

    def export_rollout(self, request: Request) -> Response:
        index, _ = self.index(request)
        found = transcripts.rollout(index, _id(request), max_chars=None)
        return _attachment(rollout_page(index.folder.path.name, found), f"rollout-{found['id']}.html")

    def export_group(self, request: Request) -> Response:
        index, _ = self.index(request)
        found = transcripts.group(index, _id(request), max_chars=None)
        return _attachment(group_page(index.folder.path.name, found), f"group-{found['id']}.html")

    def index(self, request: Request) -> tuple[RolloutIndex, float]:
        """The run's index, and the share of its files that is in it. The first look at a large run does not wait."""
        index = RolloutIndex(self._catalog.get(request.path_params["run"]).folder)
        key = str(index.folder.path)
        with self._lock:
            busy = key in self._indexing
        share = index.update(within_s=0.0 if busy else _WITHIN_S)
        if share < 1.0 and not busy:
            with self._lock:
                self._indexing.add(key)
            threading.Thread(target=self._go_on, args=(index,), name="palestra-index", daemon=True).start()
        return index, share

    def _go_on(self, index: RolloutIndex) -> None:
        try:
            index.update()
        finally:
            with self._lock:
                self._indexing.discard(str(index.folder.path))


def _id(request: Request) -> int:
    return transcripts.require_id(request.path_params["id"])


def _attachment(page: str, name: str) -> Response:
    # what is opened from the disk has the page's own policy; here nothing of it may run
    headers: dict[str, Any] = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
    }
    return Response(page.encode("utf-8", "replace"), media_type="text/html", headers=headers)
