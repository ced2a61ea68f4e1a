"""Many environment clients post to the trajectory API at once while a trainer reads; the server is killed midway.

    python benchmarks/trajectory_load.py --clients 50 --groups 200 --kills 2

Every group carries its own number as a token. At the end each number must have come out exactly once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SERVER = [sys.executable, "-c", "from palestra.cli.main import main; main()", "trajectory"]
GROUP_SIZE, BATCH_SIZE = 2, 16


class Api:
    """The server's process; it comes back on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [*SERVER, "--folder", str(self.folder), "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ask(url: str, path: str, body: Any = None, key: str | None = None, give_up_s: float = 60.0) -> Any:
    """HTTP that keeps on trying while the server is away."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
    until = time.monotonic() + give_up_s
    while True:
        request = urllib.request.Request(f"{url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > until:
                raise
        except (OSError, http.client.HTTPException):
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def post_groups(url: str, client: int, groups: int) -> None:
    for i in range(groups):
        number = client * groups + i
        rows = [[number, 1, 2]] * GROUP_SIZE
        body = {"tokens": rows, "masks": [[-100, 1, 2]] * GROUP_SIZE, "scores": [0.0, 1.0]}
        ask(url, "/scored_data", body, key=f"group-{number}")


def be_clients(url: str, clients: int, groups: int) -> int:
    """Fork a process for each client, so that everything is imported once. How many of them failed."""
    for client in range(clients):
        if os.fork() == 0:
            try:
                post_groups(url, client, groups)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    return sum(os.wait()[1] != 0 for _ in range(clients))


def take_batches(url: str, groups: int, seen: list[int]) -> None:
    after = 0
    while len(seen) < groups:
        answer = ask(url, f"/batch?after={after}")
        if answer["batch"] is None:
            time.sleep(0.02)
            continue
        assert sum(len(group["tokens"]) for group in answer["batch"]) == BATCH_SIZE
        assert answer["number"] == after + 1
        after = answer["number"]
        seen += [group["tokens"][0][0] for group in answer["batch"]]


def run(clients: int, groups: int, kills: int, folder: Path) -> dict[str, float]:
    """Groups that came out, those twice, those lost; and how long it took."""
    api, seen, total = Api(folder), list[int](), clients * groups
    began = time.perf_counter()
    try:
        exchange(api, clients, groups, kills, seen)
    finally:
        api.kill()
    seconds = time.perf_counter() - began
    return {
        "groups": total,
        "delivered": len(seen),
        "twice": len(seen) - len(set(seen)),
        "lost": len(set(range(total)) - set(seen)),
        "seconds": round(seconds, 1),
        "groups_per_second": round(total / seconds, 1),
    }


def exchange(api: Api, clients: int, groups: int, kills: int, seen: list[int]) -> None:
    """All clients, each a process, post at once while one trainer takes; the server is killed now and then."""
    total = clients * groups
    ask(api.url, "/register", {"batch_size": BATCH_SIZE, "max_token_len": 64, "num_steps": 1 << 30})
    trainer = threading.Thread(target=take_batches, args=(api.url, total, seen), daemon=True)
    trainer.start()
    command = [sys.executable, __file__, "--groups", str(groups), "--clients", str(clients), "--post", api.url]
    posting = subprocess.Popen(command)
    for i in range(kills):
        while len(seen) < total * (i + 1) / (kills + 2) and trainer.is_alive():
            time.sleep(0.01)
        api.kill()
        api.start()
    assert posting.wait() == 0, "clients failed"
    trainer.join(120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--post", metavar="URL", help="be the clients (the script calls itself so)")
    options = parser.parse_args()
    if options.post:
        sys.exit(be_clients(options.post, options.clients, options.groups))
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(options.clients, options.groups, options.kills, Path(name))))
