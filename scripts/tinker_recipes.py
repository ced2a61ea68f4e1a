"""Unmodified recipes of the Tinker cookbook against one `palestra tinker`, on this machine and without a network.

    python scripts/tinker_recipes.py            all of them, to the end: `make test-tinker`
    python scripts/tinker_recipes.py --short    two steps each on palestra/tiny: whether they run at all
    python scripts/tinker_recipes.py math_rl    one of them

The cookbook gets a virtual environment of its own, build/tinker-cookbook, on top of this one's packages. Where it
cannot be installed, the recipes are skipped, and that is said. Datasets of the hub are folders of the same names, with
made-up rows, in the working folder of the recipes.
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
from palestra.train.watcher import sigterm_as_ctrl_c

HOME = Path(__file__).parents[1] / "build" / "tinker-cookbook"
COOKBOOK = "tinker-cookbook==0.5.8"
# With what these recipes import beside what is here. Its own list asks for other versions and for much more.
PACKAGES = f"{COOKBOOK} chz blobfile lxml pycryptodomex termcolor cloudpickle pylatexenc textarena nltk"
TINY = "Qwen/Qwen3-8B"  # palestra/tiny by a name for which the cookbook knows a chat format
TIMEOUT_S = 3600.0  # of one recipe; the longest takes 8 CPU minutes


@dataclass(frozen=True)
class Recipe:
    command: str  # a module of tinker_cookbook.recipes, and its settings
    metric: str
    steps: int = 3
    gain: float = 0.0  # of the metric's mean over the last five steps, from that over the first two; 0: any
    model: str = "palestra/tiny"


COLON, CHAT = "renderer_name=role_colon", "renderer_name=qwen3_disable_thinking"
FEW = "batch_size=4 group_size=4 max_tokens=16"
RL = "groups_per_batch=4 group_size=4 lora_rank=8 save_every=0 eval_every=0"
RECIPES = {
    "chat_sl": Recipe(
        f"chat_sl.train dataset={{cookbook}}/example_data/conversations.jsonl {COLON} batch_size=8 max_length=256 "
        "learning_rate=2e-3 num_epochs=3 save_every=0 eval_every=0",
        "train_mean_nll",
        30,
        -1.0,
    ),
    "dpo": Recipe(
        f"preference.dpo.train {COLON} dataset=hhh batch_size=8 max_length=256 learning_rate=1e-3", "dpo_loss", 12, -0.3
    ),
    "sl_loop": Recipe(
        "sl_loop batch_size=8 max_length=256 lora_rank=8 learning_rate=2e-3 save_every=2", "train_mean_nll", 12, -1.0
    ),
    "rl_loop": Recipe(f"rl_loop {FEW} lora_rank=8 save_every=2", "reward/total"),
    "gsm8k_ppo": Recipe(f"math_rl.train env=gsm8k loss_fn=ppo {COLON} {RL} max_tokens=16", "env/all/reward/total"),
    "distillation": Recipe(
        f"distillation.on_policy_distillation teacher_model={TINY} {COLON} {RL} max_tokens=16", "teacher_kl"
    ),
    "guess_number": Recipe(f"multiplayer_rl.guess_number.train {CHAT} {FEW} eval_every=0", "env/all/reward/total"),
    "text_arena": Recipe(
        f"multiplayer_rl.text_arena.train {CHAT} batch_size=8 num_train_datapoints=64 num_test_datapoints=8 "
        "max_tokens=24 eval_every=0",
        "env/all/reward/total",
    ),
    "shorter": Recipe(f"preference.shorter.train {CHAT} {FEW} eval_every=0", "env/all/reward/total"),
    "math_rl": Recipe(
        f"math_rl.train env=arithmetic {COLON} groups_per_batch=16 group_size=8 max_tokens=4 lora_rank=8 "
        "learning_rate=5e-4 save_every=0 eval_every=0",
        "env/all/correct",
        20,
        0.3,
        "palestra/smollm2",
    ),
}

THINGS = ("a cup", "the moon", "a river", "paper", "a clock", "snow", "a bridge", "salt")
LONG = "Well, that is a very good question, and I would like to say at length that it is"


def row(i: int) -> dict[str, dict[str, object]]:
    """One made-up row of each dataset."""
    question, thing = f"What is {i} + {i % 7}?", THINGS[i % len(THINGS)]
    asked = f"\n\nHuman: What is number {i}?\n\nAssistant:"
    said = [{"role": "user", "content": f"What is number {i}?"}, {"role": "assistant", "content": f"It is {thing}."}]
    return {
        "openai/gsm8k": {"question": question, "answer": f"We add. #### {i + i % 7}"},
        "zwhe99/DeepMath-103K": {"question": question},
        "HuggingFaceH4/no_robots": {"messages": said},
        "Anthropic/hh-rlhf": {"chosen": f"{asked} It is {thing}.", "rejected": f"{asked} {LONG} {thing}."},
    }


def write_datasets(folder: Path, rows: int = 128) -> None:
    for name in row(0):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines = [json.dumps(row(i)[name]) + "\n" for i in range(rows)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))
        config = "main" if name == "openai/gsm8k" else "default"
        files = "".join(f"\n  - {{split: {split}, path: {split}.jsonl}}" for split in ("train", "test"))
        about = f"---\nconfigs:\n- config_name: {config}\n  data_files:{files}\n---\n"
        (folder / name / "README.md").write_text(about)


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        assert process.stdout is not None
        try:
            yield next(line.split()[-1] for line in process.stdout if "http://" in line)
        finally:
            process.terminate()


def run(name: str, recipe: Recipe, python: Path, folder: Path, url: str, short: bool) -> bool:
    model = TINY if short or recipe.model == "palestra/tiny" else load_model(recipe.model, device="cpu").path
    log, packages = folder / name, next((HOME / "lib").glob("*/site-packages/tinker_cookbook"))
    settings = f"model_name={model} log_path={log} max_steps={2 if short else recipe.steps}"
    command = f"-m tinker_cookbook.recipes.{recipe.command.format(cookbook=packages)} {settings}"
    print(f"$ python {command}", flush=True)
    environment = {
        **os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets"),
    }  # fmt: skip
    began = time.monotonic()
    with (folder / f"{name}.log").open("w") as output:
        try:
            ended: object = subprocess.run(
                [str(python), *command.split()],
                stdout=output, stderr=output, env=environment, cwd=folder, timeout=TIMEOUT_S,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            ended = f"none after {TIMEOUT_S:g} s"
    rows = [json.loads(line) for line in (log / "metrics.jsonl").open()] if (log / "metrics.jsonl").exists() else []
    values = [row[recipe.metric] for row in rows if recipe.metric in row]
    if ended or len(values) < (2 if short else recipe.steps):
        print((folder / f"{name}.log").read_text()[-4000:])
        print(f"{name}: FAILED, exit status {ended}, {len(values)} steps", flush=True)
        return False
    first, last = fmean(values[:2]), fmean(values[-5:])
    enough = short or (last - first) * recipe.gain >= recipe.gain**2
    print(
        f"{name} on {'palestra/tiny' if model == TINY else recipe.model}: {recipe.metric} {first:.3f} -> {last:.3f} in "
        f"{len(values)} steps, {(time.monotonic() - began) / 60:.1f} min"
        + ("" if enough else f"; FAILED: expected a change of {recipe.gain:+g}"),
        flush=True,
    )
    return enough


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], help="default: all")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    names = options.names or list(RECIPES)
    python = cookbook()
    if python is None:
        print(f"SKIPPED: {', '.join(names)}: {COOKBOOK} could not be installed")
        return 0
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="tinker-recipes-") as root:  # the server ends, too
        folder = Path(root)
        write_datasets(folder)
        (folder / TINY).parent.mkdir()
        (folder / TINY).symlink_to(load_model("palestra/tiny", device="cpu").path)
        others = {RECIPES[name].model for name in names} - {"palestra/tiny"}
        models = [] if options.short else [load_model(name, device="cpu").path for name in others]
        with server([TINY, *models], folder) as url:
            passed = [name for name in names if run(name, RECIPES[name], python, folder, url, options.short)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(passed)} of {len(names)} recipes pass, {(used.ru_utime + used.ru_stime) / 60:.1f} CPU minutes")
    return int(passed != names)


if __name__ == "__main__":
    sys.exit(main())
