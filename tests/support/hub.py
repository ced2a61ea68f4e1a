"""A stand-in for the Hugging Face hub's upload API: repositories in memory, small files and LFS."""

import base64
import json
from dataclasses import dataclass, field
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TOKEN = "hf_test"


@dataclass
class FakeHub:
    """`files` by repository and path, after a commit; `created` are the bodies of the requests that make one."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        repo = "{user}/{name}"
        routes = [
            Route("/api/validate-yaml", self._validate, methods=["POST"]),
            Route("/api/repos/create", self._create, methods=["POST"]),
            Route(f"/api/models/{repo}/preupload/main", self._preupload, methods=["POST"]),
            Route(f"/{repo}.git/info/lfs/objects/batch", self._batch, methods=["POST"]),
            Route("/objects/{oid}", self._store, methods=["PUT"]),
            Route(f"/api/models/{repo}/commit/main", self._commit, methods=["POST"]),
            Route(f"/api/models/{repo}/revision/main", self._info),
            Route(f"/api/models/{repo}", self._info),
        ]
        return Starlette(routes=routes)

    async def _validate(self, request: Request) -> Response:
        card = (await request.json())["content"]
        yaml.safe_load(card.split("---")[1])
        return JSONResponse({"errors": [], "warnings": []})

    async def _create(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid username or password."}, 401)
        body = await request.json()
        self.created.append(body)
        repo = f"{body['organization']}/{body['name']}"
        self.files.setdefault(repo, {})
        return JSONResponse({"url": f"{request.base_url}{repo}", "name": repo})

    async def _preupload(self, request: Request) -> Response:
        files = (await request.json())["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] > 100_000 else "regular", "shouldIgnore": False}
            for f in files
        ]
        return JSONResponse({"files": modes})

    async def _batch(self, request: Request) -> Response:
        objects = (await request.json())["objects"]
        upload = [{**o, "actions": {"upload": {"href": f"{request.base_url}objects/{o['oid']}"}}} for o in objects]
        return JSONResponse({"transfer": "basic", "objects": upload}, media_type="application/vnd.git-lfs+json")

    async def _store(self, request: Request) -> Response:
        self.objects[request.path_params["oid"]] = await request.body()
        return Response()

    async def _commit(self, request: Request) -> Response:
        repo = "{user}/{name}".format(**request.path_params)
        for line in (await request.body()).splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.objects[value["oid"]]
        url = f"{request.base_url}{repo}/commit/abc"
        return JSONResponse({"commitUrl": url, "commitOid": "abc", "success": True})

    async def _info(self, request: Request) -> Response:
        repo = "{user}/{name}".format(**request.path_params)
        if repo not in self.files:
            return JSONResponse({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return JSONResponse({"id": repo, "sha": "0" * 40, "siblings": []})
