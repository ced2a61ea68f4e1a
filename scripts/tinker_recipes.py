"""Unmodified recipes of the Tinker cookbook against `palestra tinker`, on this machine and without a network.

    python scripts/tinker_recipes.py            all of them, to the end: `make test-tinker`
    python scripts/tinker_recipes.py --short    two steps each on palestra/tiny: whether they run at all
    python scripts/tinker_recipes.py math_rl    one of them

The cookbook gets a virtual environment of its own, build/tinker-cookbook, on top of this one's packages. Where it
cannot be installed, the recipes are skipped, and that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from palestra.models.loading import load_model
from palestra.train.interrupt import sigterm_as_ctrl_c

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "tinker-cookbook"
COOKBOOK = "tinker-cookbook==0.5.8"
# With what these recipes import beside what is here. Its own list asks for other versions and for much more.
PACKAGES = f"{COOKBOOK} chz blobfile lxml pycryptodomex termcolor cloudpickle pylatexenc"
RENDERER = "role_colon"  # the cookbook's chat format for any model


@dataclass(frozen=True)
class Recipe:
    model: str
    command: str  # {model}, {renderer}, {url}, {log}, {steps}, {cookbook}
    steps: int
    metric: str
    gain: float  # of the metric's mean over the last five steps, from that over the first two


RECIPES = {
    "math_rl": Recipe(
        "palestra/smollm2",
        "-m tinker_cookbook.recipes.math_rl.train env=arithmetic model_name={model} renderer_name={renderer} "
        "base_url={url} groups_per_batch=16 group_size=8 max_tokens=4 lora_rank=8 learning_rate=5e-4 max_steps={steps} "
        "save_every=0 eval_every=0 log_path={log} behavior_if_log_dir_exists=delete",
        20,
        "env/all/correct",
        0.3,
    ),
    "chat_sl": Recipe(
        "palestra/tiny",
        "-m tinker_cookbook.recipes.chat_sl.train dataset={cookbook}/example_data/conversations.jsonl "
        "model_name={model} renderer_name={renderer} base_url={url} batch_size=8 max_length=256 learning_rate=2e-3 "
        "num_epochs=3 max_steps={steps} save_every=0 eval_every=0 log_path={log} behavior_if_log_dir_exists=delete",
        30,
        "train_mean_nll",
        -1.0,
    ),
    "dpo": Recipe(
        "palestra/tiny",
        f"{ROOT}/scripts/tinker_dpo.py {{model}} {{renderer}} {{url}} {{log}} {{steps}}",
        12,
        "dpo_loss",
        -0.3,
    ),
}


def cookbook() -> Path | None:
    """The Python of an environment that has the cookbook; None where it cannot be had."""
    python, ready = HOME / "bin" / "python", HOME / ".ready"
    if not ready.exists() or ready.read_text() != PACKAGES:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(HOME)], check=True)
        (packages,) = (HOME / "lib").glob("*/site-packages")
        (packages / "zzz_here.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--retries=1", "--timeout=20"]
        if subprocess.run([*pip, "install", "--quiet", "--no-deps", *PACKAGES.split()]).returncode:
            return None
        ready.write_text(PACKAGES)
    return python


@contextmanager
def server(models: list[str], folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "palestra", "tinker", *models, "--port", "0", "--rows-per-pass", "16"]
    environment = {**os.environ, "PALESTRA_HOME": str(folder / "home")}
    with subprocess.Popen(
        [*command, "--output_dir", str(folder / "runs")], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield next(line.split()[-1] for line in process.stdout if "http://" in line)
        finally:
            process.terminate()


def run(name: str, recipe: Recipe, python: Path, folder: Path, short: bool) -> bool:
    model = "palestra/tiny" if short else recipe.model
    path = load_model(model, device="cpu").path
    log, packages = folder / name, next((HOME / "lib").glob("*/site-packages/tinker_cookbook"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with server([path], folder) as url:
        values = {"model": path, "renderer": RENDERER, "url": url, "log": log, "cookbook": packages}
        command = recipe.command.format(**values, steps=2 if short else recipe.steps)
        print(f"$ python {command}", flush=True)
        environment = {**os.environ, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        began = time.monotonic()
        with (folder / f"{name}.log").open("w") as output:
            ended = subprocess.run(
                [str(python), *command.split()], stdout=output, stderr=output, env=environment, cwd=folder
            )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_minutes = sum(getattr(after, f"ru_{k}time") - getattr(before, f"ru_{k}time") for k in ("u", "s")) / 60
    rows = [json.loads(line) for line in (log / "metrics.jsonl").open()] if (log / "metrics.jsonl").exists() else []
    values_ = [row[recipe.metric] for row in rows if recipe.metric in row]
    if ended.returncode or not values_:
        print((folder / f"{name}.log").read_text()[-4000:])
        print(f"{name}: FAILED, exit status {ended.returncode}, {len(values_)} steps")
        return False
    first, last = fmean(values_[:2]), fmean(values_[-5:])
    enough = short or (last - first) * recipe.gain >= recipe.gain**2
    print(
        f"{name} on {model}: {recipe.metric} {first:.3f} -> {last:.3f} in {len(values_)} steps, "
        f"{cpu_minutes:.1f} CPU minutes, {(time.monotonic() - began) / 60:.1f} min"
        + ("" if enough else f"; FAILED: expected a change of {recipe.gain:+g}"),
        flush=True,
    )
    return enough


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], help="default: all")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    python = cookbook()
    if python is None:
        print(f"SKIPPED: {', '.join(options.names or RECIPES)}: {COOKBOOK} could not be installed")
        return 0
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="tinker-recipes-") as folder:  # the server ends, too
        names = options.names or list(RECIPES)
        return int(not all([run(name, RECIPES[name], python, Path(folder), options.short) for name in names]))


if __name__ == "__main__":
    sys.exit(main())
