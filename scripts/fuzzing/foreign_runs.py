"""Changed values, files and pickles in foreign run folders: the dashboard and `palestra runs` must still show them."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient
from torch.distributed.checkpoint import save

from fuzzing.check import Tally, mutate
from fuzzing.servers import ODD_VALUES
from palestra.cli.find_run import code_of_run
from palestra.cli.runs import compare_table, print_run, runs_table
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.extras.dashboard.app import dashboard_app
from palestra.extras.dashboard.catalog import Catalog
from palestra.extras.ranks.sharding import read_metadata
from palestra.runs.manager import RunManager
from palestra.runs.reader import compared, results

sys.path.insert(0, str(Path(__file__).parents[1]))
import make_runs

ADDRESS = "http://127.0.0.1:8004"
DEEP = "[" * 20_000
PAGES = ("", "/metrics", "/logs", "/evaluations", "/rollouts", "/facets", "/problems", "/suspicion", "/rollouts?q=red")


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    tally = Tally("foreign run folders")
    whole = make_runs.write_run(folder / "whole", make_runs.plain_groups(8, per_step=1, size=4)).path
    (whole / "report.json").write_text(
        json.dumps({"findings": [{"sentence": "s"}], "after": {"pass_rate": {"rate": 1}}})
    )
    (whole / "index.json").write_text(
        json.dumps({"run_id": "abcd2345", "name": "n", "environment": "e", "created": 1.0})
    )
    metadata = _metadata(folder)
    manager = RunManager(folder / "home")
    for number in range(count):
        run = folder / "run"
        shutil.copytree(whole, run)
        what = f"input {number}: {_damage(run, rng)!a}"
        with tally.watch(what):
            _look(RunFolder(run), manager, tally, what)
        shutil.rmtree(run)
        with tally.watch(f"input {number}: .metadata"):
            _read(mutate(metadata, rng), folder / ".metadata")
    return tally


def _metadata(folder: Path) -> bytes:
    save({"weight/a": torch.ones(2, 3), "exp_avg/a": torch.zeros(2, 3)}, checkpoint_id=folder / "shards", no_dist=True)
    return (folder / "shards" / ".metadata").read_bytes()


def _read(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    try:
        read_metadata(path)
    except pickle.UnpicklingError as error:
        raise PalestraError(" ".join(str(error).split()) or "it cannot be read") from None


def _damage(run: Path, rng: random.Random) -> str:
    """Change one value of a JSON file or of a line, bytes of a file, or what kind of file it is."""
    name = rng.choice(["rollouts.jsonl", "rollouts.jsonl", "metrics.jsonl", "run.json", "index.json", "report.json",
                       "config.yaml"])  # fmt: skip
    file = run / name
    match rng.randrange(8):
        case 0:
            file.write_bytes(mutate(file.read_bytes(), rng))
            return f"bytes of {name}"
        case 1:
            file.write_text(DEEP)
            return f"{name} is deep"
        case 2:
            file.unlink()
            rng.choice([lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), file.mkdir, lambda: None])()
            return f"{name} is another kind of file"
    if name == "config.yaml":
        file.write_text(f"---\nmodel:\n  name: {json.dumps(rng.choice(ODD_VALUES))}\n...\n")
        return name
    lines = file.read_text().splitlines() if name.endswith(".jsonl") else [file.read_text()]
    at = rng.randrange(len(lines))
    row = json.loads(lines[at])
    place = _change(row, rng)
    lines[at] = json.dumps(row)
    file.write_text("\n".join(lines) + "\n")
    return f"{name}: {place}"


def _change(value: Any, rng: random.Random) -> str:
    """Replace one value somewhere inside by an odd one; gives where."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
        return f"{key}.{_change(value[key], rng)}"
    value[key] = rng.choice([*ODD_VALUES, "\x1b]0;owned\x07"])
    return f"{key} = {str(value[key])[:40]}"


def _look(folder: RunFolder, manager: RunManager, tally: Tally, what: str) -> None:
    """Everything that only shows a run."""
    from rich.console import Console

    app = dashboard_app(Catalog(manager, [folder]), "fuzzing")
    bearer = {"Authorization": "Bearer fuzzing"}
    with TestClient(app, base_url=ADDRESS, headers=bearer, raise_server_exceptions=False) as client:
        answers = _ask(client)
    for page, answer in answers.items():
        if answer.status_code >= 500:
            tally.fault(f"{what}: {page}: {answer.text[:500]}")
    run = manager.of_folder(RunFolder.open(folder.path))
    console = Console(file=open(os.devnull, "w"), force_terminal=False)  # noqa: SIM115
    print_run(console, run, results(run))
    console.print(runs_table([run], 120))
    console.print(compare_table([compared(run) for run in [run, run]]))
    code_of_run(folder.record)
    RunConfig.build(folder.config.model_dump())


def _ask(client: TestClient) -> dict[str, Any]:
    """The answers of all pages of the run."""
    listing = client.get("/api/runs")
    found = listing.json()["runs"] if listing.status_code == 200 else []
    answers = {"/api/runs": listing}
    for row in found:
        pages = [f"/api/runs/{row['id']}{page}" for page in PAGES]
        rollouts = client.get(pages[4]).json().get("rollouts", [])
        for rollout in rollouts[:2]:
            pages += [f"{pages[0]}/rollouts/{rollout['id']}{more}" for more in ("", "/tokens")]
            pages.append(f"{pages[0]}/groups/{rollout['group']}")
        answers |= {page: client.get(page) for page in pages}
    return answers
