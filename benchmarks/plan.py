"""The cost model of `palestra plan` against what a GPU measures: step time and peak memory of eight configurations.

    python benchmarks/plan.py                 about 6 minutes on an H200; a JSON line for each row, then a table.
    python benchmarks/plan.py --limit-s 480   no further model is begun after so many seconds
    python benchmarks/plan.py --only lora     the rows whose name ("0.6B lora", "1.7B full") has this in it
    python benchmarks/plan.py --tiny          the same script with tiny shapes on whatever is there, a minute on a CPU

Shapes of 135M to 1.7B with random weights, all weights and LoRA, rollouts of 512 to 8k tokens; whole steps of a run as
`palestra train` takes them (agent loop, engine, learner, records).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.envs.env import Env, EnvConfig
from palestra.extras.plan.shapes import find_shape
from palestra.plan.device import GIB
from palestra.plan.estimate import RunEstimate, estimate
from palestra.plan.of_config import work_of
from palestra.plan.shape import ModelShape, shape_of

ROW = "row: "
TINY = ModelShape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, feed_forward=128, vocabulary=2048, tied=True, context=40960
)
CONTEXT = 32768  # positions, at least
SHAPES = {"135M": "smollm2-135m", "0.6B": "qwen3-0.6b", "1.7B": "qwen3-1.7b"}
# (shape, rank) -> problems x group, prompt + new tokens; a process for each, as each compiles its own layers
CASES: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("135M", 0): [(32, 8, 256, 256), (16, 8, 1536, 512)],
    ("135M", 16): [(8, 8, 7680, 512)],
    ("0.6B", 0): [(16, 8, 256, 256), (4, 8, 7680, 512)],
    ("0.6B", 16): [(16, 8, 1536, 512)],
    ("1.7B", 16): [(4, 8, 7680, 512)],
    ("1.7B", 0): [(16, 8, 512, 512)],
}
TINY_CASES: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("tiny", 0): [(2, 4, 48, 32), (2, 2, 160, 32)],
    ("tiny", 16): [(2, 4, 48, 32)],
}


class NoiseConfig(EnvConfig):
    """How long the prompts are."""

    words: int = Field(1000, ge=1, description="digits in a prompt: two tokens each for palestra/tiny's tokenizer")


class Noise(Env):
    """Random digits, and a reward by chance."""

    name = "noise"
    env_config_cls: ClassVar[type[BaseModel]] = NoiseConfig

    def make_problem(self, rng: random.Random) -> Any:
        return " ".join(str(rng.randrange(10)) for _ in range(self.config.words)), ""

    def score(self, answer: str) -> float:
        return random.random()


def build_model(shape: ModelShape, device: str, dtype: Any) -> Any:
    """A Qwen3 of this shape, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied,
        max_position_embeddings=max(shape.context or 0, CONTEXT),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def shape_named(name: str) -> ModelShape:
    return TINY if name == "tiny" else find_shape(SHAPES[name])


class Probe:
    """A tracker around the run's own that notes how long prompts and completions were."""

    def __init__(self, tracker: Any) -> None:
        self.tracker, self.lengths = tracker, []

    def rollouts(self, step: int, groups: Any) -> None:
        for group in groups:
            for rollout in group.rollouts:
                sampled = sum(len(turn.token_ids) for turn in rollout.turns if turn.maker == "model")
                self.lengths.append((sum(len(turn.token_ids) for turn in rollout.turns) - sampled, sampled))
        self.tracker.rollouts(step, groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)


def build_run(loaded: Any, learner: Any, config: Any, prompt: int, runner: asyncio.Runner, steps: int) -> Any:
    from palestra.core.run_folder import RunFolder
    from palestra.envs.running import RunningEnv
    from palestra.train.run import Run
    from palestra.train.tasks import EnvironmentTask

    folder = RunFolder.create(Path(tempfile.mkdtemp()), "plan", config, {})
    task = EnvironmentTask(RunningEnv(Noise(NoiseConfig(words=words_for(loaded.tokenizer, prompt)))))
    run = Run.build(
        config, task, folder, runner=runner, loaded=loaded, learner=learner, steps=steps, keeps_checkpoints=False
    )
    run._open_records()
    run.training.tracker = Probe(run.training.tracker)
    return run


def words_for(tokenizer: Any, prompt: int) -> int:
    """Digits, with a blank between them, that are about so many tokens."""
    few, many = (len(tokenizer(" ".join(["7"] * n)).input_ids) for n in (100, 200))
    return max(1, round((prompt - 16) * 100 / (many - few)))


def settings(rank: int, problems: int, group: int, new: int, **more: Any) -> Any:
    from palestra.core.config import RunConfig

    return RunConfig.build(
        {
            "train": {"problems_per_step": problems, "mask_truncated": False, "filter_equal_groups": False},
            "rollout": {"group_size": group, "max_new_tokens": new, "temperature": 1.0},
            "lora": {"r": rank},
            "checkpoint.every": 0,
        },
        more,
    )


def child(shape: str, rank: int, cases: list[tuple[int, int, int, int]], repeats: int) -> None:
    """All rows of one model."""
    import torch

    from palestra.models.loading import LoadedModel, load_tokenizer

    cuda = torch.cuda.is_available()

    def load() -> LoadedModel:
        model = build_model(shape_named(shape), "cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
        return LoadedModel(model, load_tokenizer("palestra/tiny"), shape, "")

    loaded, learner = load(), None
    with asyncio.Runner() as runner:
        for case in cases:
            give_back_memory()
            run = measure(loaded, learner, shape, rank, case, runner, repeats, time.perf_counter())
            learner = run.training.learner
            loaded = LoadedModel(run.backend.model, loaded.tokenizer, shape, "")
            del run


def give_back_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def warm_up(run: Any) -> None:
    """A step that does not count, neither in peaks of memory nor in lengths."""
    import torch

    run.training.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    run.training.tracker.lengths.clear()


def planned_for(model: Any, config: Any, prompt_tokens: int) -> RunEstimate:
    from palestra.learner.micro_batches import device_of

    device, shape = device_of(model.device), shape_of(model.config)
    assert device is not None
    assert shape is not None
    work = work_of(config, shape, device, prompt_tokens=prompt_tokens)
    return estimate(shape, device, work)


def measure(
    loaded: Any, learner: Any, shape: str, rank: int, case: tuple[int, int, int, int], runner: Any, repeats: int,
    began: float,
) -> Any:  # fmt: skip
    import torch

    problems, group, prompt, new = case
    cuda = torch.cuda.is_available()
    kv = planned_for(loaded.model, settings(rank, problems, group, new), prompt).memory.kv
    config = settings(rank, problems, group, new, **{"model.kv_memory_gib": kv * 1.1 / GIB})  # lengths vary a little
    run = build_run(loaded, learner, config, prompt, runner, steps=repeats + 1)
    warm_up(run)
    warm_s = time.perf_counter() - began
    seconds, metrics = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        metrics.append(run.training.step())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    graphs = run.training.learner._scorer.graphs
    replays = graphs is not None and graphs.captured  # these allocate nothing: what they keep is reserved
    counted = torch.cuda.max_memory_reserved if replays else torch.cuda.max_memory_allocated
    peak = counted() / GIB if cuda else 0.0
    lengths = run.training.tracker.lengths
    prompt, sampled = (round(statistics.mean(column)) for column in zip(*lengths, strict=True))
    config.rollout.max_new_tokens = sampled
    planned = planned_for(loaded.model, config, prompt)
    measured = statistics.median(seconds)
    phases = {
        name.removesuffix("_seconds"): statistics.median(m.get(name, 0.0) for m in metrics)
        for name in metrics[0]
        if name.endswith("_seconds") and name != "elapsed_seconds"
    }
    print(ROW + json.dumps({
        "model": shape, "lora": rank, "problems": problems, "group": group, "prompt": prompt, "new": sampled,
        "measured_s": round(measured, 4), "planned_s": round(planned.time.total_s, 4),
        "time_ratio": round(planned.time.total_s / measured, 3),
        "measured_gib": round(peak, 2), "planned_gib": round(planned.memory.total / GIB, 2),
        "memory_ratio": round(planned.memory.total / GIB / peak, 3) if peak else None,
        "seconds": [round(s, 4) for s in seconds],
        "phases_s": {name: round(value, 4) for name, value in phases.items()},
        "planned_parts_s": {name: round(value, 4) for name, value in planned.time.parts.items()},
        "planned_parts_gib": {name: round(getattr(planned.memory, name) / GIB, 2) for name in
                              ("weights", "gradients", "optimizer", "master_weights", "activations", "logits", "kv")},
        "kv_gib": round(config.model.kv_memory_gib or 0.0, 3), "micro_batch": planned.work.tokens_per_micro_batch,
        "tokens_computed": metrics[0].get("tokens_computed"), "device": planned.device.name,
        "warm_up_s": round(warm_s, 1),
    }), flush=True)  # fmt: skip
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("SHAPE", "RANK"))
    arguments = parser.parse_args()
    cases = TINY_CASES if arguments.tiny else CASES
    if arguments.child:
        shape, rank = arguments.child[0], int(arguments.child[1])
        child(shape, rank, cases[shape, rank], arguments.repeats)
        return
    rows, began = [], time.perf_counter()
    for shape, rank in cases:
        if arguments.only not in f"{shape} {'lora' if rank else 'full'}":
            continue
        if time.perf_counter() - began > arguments.limit_s:
            print(f"{shape} {rank} left out: {arguments.limit_s:.0f} s have passed", flush=True)
            continue
        command = [sys.executable, __file__, "--child", shape, str(rank), "--repeats", str(arguments.repeats)]
        process = subprocess.Popen([*command, *["--tiny"] * arguments.tiny], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            rows += [json.loads(line.removeprefix(ROW))] if line.startswith(ROW) else []
        if process.wait():
            print(f"{shape} {rank} ended with {process.returncode}", flush=True)
    table(rows)


def table(rows: list[dict[str, Any]]) -> None:
    heads = "model | trained | rollouts | tokens | measured s | planned s | ratio | measured GiB | planned GiB | ratio"
    print(f"\n| {heads} |")
    print("| --- " * 10 + "|")
    for row in (row for row in rows if "model" in row):
        print(
            f"| {row['model']} | {'LoRA' if row['lora'] else 'all'} | {row['problems']} x {row['group']} "
            f"| {row['prompt']} + {row['new']} "
            f"| {row['measured_s']:.2f} | {row['planned_s']:.2f} | {row['time_ratio']} "
            f"| {row['measured_gib']:.1f} | {row['planned_gib']:.1f} | {row['memory_ratio']} |"
        )


if __name__ == "__main__":
    main()
