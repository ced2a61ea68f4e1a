"""How the dashboard does with a run of 100,000 rollouts: seconds to index, first page, search, and its memory.

python scripts/make_runs.py /tmp/large/run --rollouts 100000
python benchmarks/dashboard.py /tmp/large/run
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    words = [sys.executable, "-m", "palestra", "dashboard", str(options.run), "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        with httpx.Client(base_url=url, timeout=600) as client:
            print(json.dumps(measure(client, server.pid, options.requests), indent=1))
    finally:
        server.terminate()
        server.wait()


def measure(client: httpx.Client, pid: int, requests: int) -> dict[str, float]:
    api = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"

    def timed(path: str) -> tuple[float, float, dict]:
        began, cpu = time.perf_counter(), cpu_s(pid)
        answer = client.get(f"{api}{path}").raise_for_status().json()
        return time.perf_counter() - began, cpu_s(pid) - cpu, answer

    found: dict[str, float] = {}
    found["first_look_s"], _, page = timed("/rollouts")
    began, cpu = time.perf_counter(), cpu_s(pid)
    while page["indexed"] < 1.0:
        time.sleep(1.0)
        _, _, page = timed("/rollouts?limit=1")
    found["indexing_s"], found["indexing_cpu_s"] = time.perf_counter() - began, cpu_s(pid) - cpu
    found["rollouts"] = page["count"]
    kinds = {
        "first_page": "/rollouts",
        "by_reward": "/rollouts?sort=-reward",
        "filtered": "/rollouts?passed=1&tool=multiply",
        "search": "/rollouts?q=golden%20bowl",
        "search_phrase": "/rollouts?q=%22That%20costs%20160%22",
        "facets": "/facets",
        "suspicion": "/suspicion",
        "problems": "/problems",
    }
    for name, path in kinds.items():
        found[f"{name}_s"], found[f"{name}_cpu_s"], page = timed(path)
    rows = timed("/rollouts?sort=oldest")[2]["rollouts"]
    found["rollout_s"], found["rollout_cpu_s"], _ = timed(f"/rollouts/{rows[-1]['id']}")
    found["tokens_s"], found["tokens_cpu_s"], _ = timed(f"/rollouts/{rows[-1]['id']}/tokens")
    found["group_s"], found["group_cpu_s"], _ = timed(f"/groups/{rows[-1]['group']}")
    cursor, sizes = "", []
    for number in range(requests):
        path = f"/rollouts?limit=50&cursor={cursor}" if number % 2 else f"/rollouts/{1 + 97 * number % 100_000}"
        answer = timed(path)[2]
        cursor = answer.get("next") or "" if number % 2 else cursor
        if number % 50 == 0:
            sizes.append(resident_mib(pid))
    found["memory_after_100_requests_mib"], found["memory_at_the_end_mib"] = sizes[2], resident_mib(pid)
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
