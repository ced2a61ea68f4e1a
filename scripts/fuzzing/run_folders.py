"""Random cuts of a run folder, then what a resume reads: no row of a step that the checkpoint holds is lost.

All of a resume but the training itself runs here, in this process: the folder is opened, a checkpoint chosen and
checked, and the records are cut back to it. tests/faults resume whole runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from fuzzing.check import Tally
from palestra.core.config import RunConfig
from palestra.core.run_folder import Resume, RunFolder
from palestra.env_api import train_env
from palestra.envs.discover import load_env
from palestra.runs.tracking import open_trackers
from palestra.train.checkpoint import choose_checkpoint, drop_after
from palestra.train.evaluation import read_evaluation

STEPS = 3
ODD_TEXT = "早上好\u2028\u2029\u0085é🙂"


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    tally = Tally("run folders")
    whole = trained(folder / "whole")
    records = [whole / "metrics.jsonl", whole / "rollouts.jsonl"]
    for number in range(count):
        run = folder / "cut"
        shutil.copytree(whole, run, copy_function=os.link)  # whoever writes, replaces the file
        name = cut(run, rng)
        before = {path.name: rows(run / path.name) for path in records}
        with tally.watch(f"cut {number} of {name}"):
            done = resume(run)
            for path in records:
                kept = rows(run / path.name)
                expected = [row for row in before[path.name] if row.get("step", STEPS + 1) <= done]
                if kept != expected:
                    tally.fault(f"cut {number} of {name}: {path.name} has {len(kept)} rows, expected {len(expected)}")
        shutil.rmtree(run)
    return tally


def trained(folder: Path) -> Path:
    """A short run with a checkpoint after each step, and texts that are easily broken."""
    settings = {
        "train": {"max_steps": STEPS, "problems_per_step": 1}, "rollout": {"group_size": 2, "max_new_tokens": 8},
        "checkpoint": {"every": 1, "keep_last": STEPS}, "eval": {"cases": 2, "every": 1},
    }  # fmt: skip
    train_env(load_env("calculator"), RunConfig.build(settings), folder=folder)
    path = folder / "rollouts.jsonl"
    texts = [json.dumps(row | {"odd": ODD_TEXT}, ensure_ascii=False) for row in rows(path)]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    for file in folder.rglob("*.safetensors"):  # large, and checked by their sums alone
        if file.parent.parent.name != "checkpoints":
            file.unlink()
    return folder


def cut(run: Path, rng: random.Random) -> str:
    """Cut a file off, or leave zeros at its end as a power cut does, or delete it."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    file = rng.choice([run / "metrics.jsonl", run / "rollouts.jsonl", *files])
    data = file.read_bytes()
    file.unlink()
    end = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            pass
        case 1:
            file.write_bytes(data[:end] + bytes(min(len(data) - end, 4096)))
        case _:
            file.write_bytes(data[:end])
    return str(file.relative_to(run))


def resume(path: Path) -> int:
    """What a resume reads and cuts back; gives the step that it goes on from."""
    run = RunFolder.open(path)
    chosen = choose_checkpoint(run, None, lambda text: None)
    done = chosen[1].step if chosen else 0
    config = Resume(path).config(run.config, done)
    run.elapsed_s()
    for name in run.eval_names():
        read_evaluation(run.eval_file(name))
    open_trackers(config, run, run.record, resume_after=done).close()
    drop_after(run, done)
    run.report()
    return done


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are whole, by a reader of our own."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
