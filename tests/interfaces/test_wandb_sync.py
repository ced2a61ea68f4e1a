"""W&B's own `wandb sync` opens an offline run and sends its numbers to a (local) server."""

import gzip
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("wandb")

from served import json_app
from trackers import silence_services, track

PROJECT = {"id": "p", "name": "gym", "entity": {"id": "e", "name": "me"}}
BUCKET = {"id": "b", "name": "run", "displayName": "run", "sweepName": "", "project": PROJECT, "historyLineCount": 0}
ANSWER = {
    "viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
    "createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []},
    "model": None,
    "project": None,
}


class WandbServer:
    """The part of a W&B server that receives a run; records the history lines and run ids that arrive."""

    def __init__(self):
        self.history, self.run_ids = [], set()

    async def answer(self, request):
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        asked, bucket = json.loads(body or b"{}"), BUCKET
        if "/file_stream" in request.url.path:
            lines = asked.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += map(json.loads, lines)
        elif asked.get("operationName") == "UpsertBucket" and asked["variables"].get("name"):
            bucket = {**BUCKET, "name": asked["variables"]["name"]}
            self.run_ids.add(bucket["name"])
        data = {**ANSWER, "upsertBucket": {"bucket": bucket, "inserted": True}}
        return {"data": data} if request.url.path == "/graphql" else {}


def test_wandb_sync_reads_an_offline_run_and_its_resumption_as_one_run(tmp_path, monkeypatch, serve):
    silence_services(monkeypatch, tmp_path)
    folder, server = tmp_path / "run", WandbServer()
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(folder, ["wandb"], range(1, 4), None)
    track(folder, ["wandb"], range(4, 6), 3)
    runs = sorted(str(p) for p in (folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2

    address = {"WANDB_BASE_URL": serve(json_app(server.answer)), "WANDB_API_KEY": "x" * 40}
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"} | address
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *runs]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted((row["step"], row["loss"]) for row in server.history) == [(step, step / 2) for step in range(1, 6)]
    assert all(row["pass_rate/is exact?"] == 1 for row in server.history)
    assert server.run_ids == {(folder / "wandb_run_id").read_text()}
