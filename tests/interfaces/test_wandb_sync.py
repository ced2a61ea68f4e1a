"""W&B's own `wandb sync` opens an offline run and sends its numbers to a (local) server."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")

from trackers import silence_services, track

PROJECT = {"id": "p", "name": "gym", "entity": {"id": "e", "name": "me"}}
BUCKET: dict[str, Any] = {
    "id": "b",
    "name": "run",
    "displayName": "run",
    "sweepName": "",
    "project": PROJECT,
    "historyLineCount": 0,
}
ANSWER = {
    "viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
    "createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []},
    "model": None,
    "project": None,
}


class WandbServer(ThreadingHTTPServer):
    """As much of a W&B server as receiving a run takes; keeps the history lines that arrive."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[dict[str, Any]] = []
        self.run_ids: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = json.loads(body or b"{}")
        bucket = BUCKET
        if "/file_stream" in self.path:
            lines = request.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += map(json.loads, lines)
        elif request.get("operationName") == "UpsertBucket" and request["variables"].get("name"):
            bucket = {**BUCKET, "name": request["variables"]["name"]}
            self.server.run_ids.add(bucket["name"])
        data = {**ANSWER, "upsertBucket": {"bucket": bucket, "inserted": True}}
        answer = json.dumps({"data": data} if self.path == "/graphql" else {}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _silent_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silence_services(monkeypatch, tmp_path)


@pytest.fixture
def server() -> Iterator[WandbServer]:
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_wandb_sync_reads_an_offline_run_and_its_resumption_as_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: WandbServer
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(folder, ["wandb"], range(1, 4), None)
    track(folder, ["wandb"], range(4, 6), 3)
    runs = sorted(str(p) for p in (folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2

    address = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "x" * 40}
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"} | address
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *runs]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted((row["step"], row["loss"]) for row in server.history) == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
        (5, 2.5),
    ]
    assert all(row["pass_rate/is exact?"] == 1 for row in server.history)
    assert server.run_ids == {(folder / "wandb_run_id").read_text()}
