"""kill -9 in the middle of a training that samples ahead: no group is lost, none is trained twice."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from forkserver import Forkserver

# Twelve steps of fakes; every group says its number, and every trained step is a line on disk before the checkpoint.
SCRIPT = """
import asyncio, json, random, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
sys.path.insert(0, {fakes!r})
from loop_fakes import PROBLEMS, FakeCollector, make_loop
from palestra.core.types import Group
from palestra.train.checkpoint import last_checkpoint, read_checkpoint
from palestra.train.group_queue import GroupQueue
from palestra.train.group_source import ProblemSource

folder = Path(sys.argv[1])
log = (folder / "log.jsonl").open("a", buffering=1)

class Slow(FakeCollector):
    async def collect(self, problems, group_size, seed_keys, on_rollout=None):
        [group] = await super().collect(problems, group_size, seed_keys)
        number = seed_keys[0].rpartition("/")[2]
        await asyncio.sleep(random.lognormvariate(-4.5, 1.0))
        log.write(json.dumps({{"sampled": int(number)}}) + "\\n")
        return [Group(number, group.rollouts)]

loop = make_loop({{"rollout.max_staleness": 2, "checkpoint.every": 3}}, steps=12, checkpoints=folder / "checkpoints")
training = loop.training
def record(step, groups):
    rows = [[int(g.problem_id), [t.versions.tolist() for r in g.rollouts for t in r.turns]] for g in groups]
    log.write(json.dumps({{"step": step, "groups": rows}}) + "\\n")
training.tracker.rollouts = record
training.source = GroupQueue(
    ProblemSource(Slow(loop.calls, loop.policy), PROBLEMS, {{}}, 2, 0), per_step=2, max_staleness=2,
    journal_file=folder / "queue.sqlite", steps_left=lambda: training.steps_left,
)
training.learner_thread = ThreadPoolExecutor(1)
if path := last_checkpoint(folder / "checkpoints"):
    training.resume(path, read_checkpoint(path))
log.write(json.dumps({{"life": training.state.step}}) + "\\n")
with training.runner:
    training.run()
    training.source.close()
log.write(json.dumps({{"staleness": max(row["staleness_max"] for _, row in loop.tracker.rows)}}) + "\\n")
"""


def rows(folder: Path) -> list[dict[str, object]]:
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def test_a_run_that_is_killed_trains_every_group_once(forkserver: Forkserver, tmp_path: Path) -> None:
    rng = random.Random(os.getpid())
    code = SCRIPT.format(fakes=str(Path(__file__).parents[1] / "support"))
    for life in range(2):
        process = forkserver.popen("-c", code, str(tmp_path))
        if life == 0:
            wanted, deadline = rng.randint(4, 9), time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                if max((row["step"] for row in rows(tmp_path) if "step" in row), default=0) >= wanted:  # type: ignore[type-var]
                    break
                time.sleep(0.001)
            time.sleep(rng.random() * 0.03)
            process.send_signal(signal.SIGKILL)
        process.wait(120)
    assert process.returncode == 0
    found = rows(tmp_path)
    first, second = (row["life"] for row in found if "life" in row)
    assert (first, second != 0) == (0, True), "it was to be killed after a checkpoint"
    # what is trained again after a checkpoint are the same groups, to the version of each token
    trained: dict[object, object] = {}
    for row in found:
        if "step" in row:
            assert trained.setdefault(row["step"], row["groups"]) == row["groups"], f"step {row['step']} differs"
    numbers = [group[0] for step in sorted(trained, key=int) for group in trained[step]]  # type: ignore
    assert numbers == list(range(24))
    assert found[-1]["staleness"] <= 2  # type: ignore[operator]
    # a group is sampled again only where it was under way, or finished and not yet on disk, at a kill
    again = Counter(row["sampled"] for row in found if "sampled" in row)
    assert sum(count - 1 for count in again.values()) <= 6
