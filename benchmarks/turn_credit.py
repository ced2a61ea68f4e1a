"""`train.credit: gigpo` against `rollout` (GRPO) on a text game of several turns, with equal sampled tokens.

    python benchmarks/turn_credit.py [--seeds 0 1 2] [--tokens 30000] [--learning-rate 3e-4] [--model FOLDER]
                                     [--json FILE]

The environment of treasure.py (find the key, then the chest) with palestra/tiny. The model cannot play it untrained, so
it first learns the commands from the games of a player that walks at random. Every training starts from that model;
`--model` reuses or keeps it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from adaptive_sampling import outcome
from treasure import WAYS, Treasure

from palestra.core.config import RunConfig
from palestra.core.types import Problem
from palestra.env_api import train_env
from palestra.envs.discover import load_env
from palestra.envs.running import RunningEnv

GAMES = 160  # of the random player
HOUSE = {"width": 3, "height": 1, "spare_turns": 4, "train_size": 200, "held_out_size": 100}
COMMON = {
    "model.name": "palestra/tiny",
    "train.problems_per_step": 8,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 96,  # of all turns
    "rollout.temperature": 1.0,
    "checkpoint.every": 0,
}
CREDITS: dict[str, dict[str, Any]] = {
    "rollout": {},
    "gigpo": {"train.credit": "gigpo", "train.discount": 0.95},  # as in the paper
}


def make_env() -> RunningEnv:
    return load_env(str(Path(__file__).with_name("treasure.py")), HOUSE)


def random_game(env: Treasure, rng: random.Random) -> list[dict[str, str]]:
    """A conversation in which the player walks at random, and takes and opens half of what it sees."""
    problem = env.make_problem(rng)
    env.problem = Problem("", problem["input"], row=problem)
    env.start()
    messages = [{"role": "system", "content": env.instructions}, {"role": "user", "content": problem["input"]}]
    reply: str | None = problem["input"]
    while reply is not None:
        thing = "take key" if "a key" in reply else "open chest" if "a chest" in reply else None
        doors = [way for way in WAYS if f"{way} to the" in reply]
        command = thing if thing and rng.random() < 0.5 else f"go {rng.choice(doors)}"
        messages.append({"role": "assistant", "content": command})
        reply = env.step(command)
        if reply is not None:
            messages.append({"role": "user", "content": reply})
    return messages


def teach(model: Path, folder: Path) -> None:
    """Save a model that knows the commands."""
    rng, env = random.Random(1), Treasure(make_env().env.config)
    games = folder / "games.jsonl"
    games.write_text("".join(json.dumps({"messages": random_game(env, rng)}) + "\n" for _ in range(GAMES)))
    settings = COMMON | {"stages.plan": "sft", "stages.traces": str(games), "stages.sft_epochs": 2, "eval.cases": 8}
    train_env(make_env(), RunConfig.build({**settings, "output_dir": str(folder)})).save_model(model)


def run(model: str, credit: str, seed: int, tokens: int, rate: float | None) -> dict[str, Any]:
    """Train once; its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        settings = COMMON | CREDITS[credit] | {"model.name": model, "train.max_sampled_tokens": tokens, "seed": seed}
        settings["train.learning_rate"] = rate
        config = RunConfig.build({**settings, "train.max_steps": 10_000, "output_dir": folder})
        return {"credit": credit, "seed": seed, **outcome(train_env(make_env(), config), began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--learning-rate", type=float, help="default: the run's own, 1e-3 for this model")
    parser.add_argument("--model", type=Path, help="the model that knows the commands; made if it does not exist")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "model"
        if not model.exists():
            teach(model, Path(folder))
        for seed in arguments.seeds:
            for credit in CREDITS:
                rows.append(row := run(str(model), credit, seed, arguments.tokens, arguments.learning_rate))
                print(
                    f"{credit:8} seed {seed}: {row['sampled_tokens']:7,} tokens, {row['steps']} steps, "
                    f"held-out {row['before']:.1%} -> {row['after']:.1%}, {row['seconds']:.0f} s",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
