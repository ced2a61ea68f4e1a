"""Mutated posts to the trajectory API: what it has received is delivered exactly once, also after a restart."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from fuzzing.check import Tally, mutate
from fuzzing.http_requests import ENV, GROUP, REGISTRATION
from fuzzing.servers import Answer, check, http, mutate_json, served, to_bytes
from palestra.extras.atropos.protocol import ModelLimits, read_group
from palestra.extras.atropos.server import trajectory_app

LIFE = 500  # posts between two restarts of the server
LIMITS = ModelLimits(vocabulary=10**6, context_tokens=128)


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    tally = Tally("wire posts")
    received: Counter[int] = Counter()
    delivered: Counter[int] = Counter()
    last_batch = 0
    for start in range(0, count, LIFE):
        with served(trajectory_app(folder / "wire", max_body_mib=1)) as (port, errors):

            def ask(method: str, path: str, body: Any, port: int = port, errors: Any = errors) -> Answer | None:
                raw = body if isinstance(body, bytes) else b"" if body is None else to_bytes(body)
                return check(tally, path, port, http(method, path, raw), errors)

            if start == 0:
                ask("POST", "/register", REGISTRATION | {"batch_size": 2})
                ask("POST", "/batch", None)
                ask("POST", "/register-env", ENV)
            for number in range(start, min(start + LIFE, count)):
                group = GROUP | {"tokens": [[number, 2, 3], [number, 2, 4]]}
                answer = ask("POST", "/scored_data", mutated(group, rng))
                if answer is not None and answer.status == 200 and answer.body.startswith(b'{"status":"received"'):
                    received[number] += 1
            while (answer := ask("POST", f"/batch?after={last_batch}", None)) and b'"number"' in answer.body:
                batch = json.loads(answer.body)
                last_batch = batch["number"]
                for columns in batch["batch"]:
                    delivered[columns["tokens"][0][0]] += 1
                    with tally.watch(f"the trainer's reading of {str(columns)[:300]}"):
                        read_group(columns, "g", LIMITS, 0)
    tally.outcomes["groups delivered"] = sum(delivered.values())
    if twice := [number for number, times in delivered.items() if times > 1 and number in received]:
        tally.fault(f"delivered twice: {twice[:10]}")
    missing = sum(received.values()) - sum(delivered.values())
    if missing > 1:  # groups of an odd size may wait for a fitting one
        lost = [number for number in received if number not in delivered]
        tally.outcomes["still waiting"] += missing
        with served(trajectory_app(folder / "wire", max_body_mib=1)) as (port, errors):
            status = check(tally, "/status", port, http("GET", "/status", b""), errors)
        waiting = json.loads(status.body)["queue_size"] if status else -1
        if waiting != missing:
            tally.fault(f"{missing} groups were received and not delivered, {waiting} wait: {lost[:10]}")
    return tally


def mutated(group: dict[str, Any], rng: random.Random) -> bytes:
    """Half of them stay valid JSON; the number in `tokens` is left alone where it can be."""
    rest = {name: value for name, value in group.items() if name != "tokens"}
    if rng.random() < 0.3:
        return mutate(to_bytes(group), rng)
    if rng.random() < 0.5:
        return to_bytes(mutate_json(group, rng))
    changed = mutate_json(rest, rng)
    return to_bytes(changed | {"tokens": group["tokens"]} if isinstance(changed, dict) else changed)
