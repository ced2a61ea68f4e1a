"""What the host does in a training step: agent loop, templates, tools, scores, planning, packing and records, with the
GPU's runner but no model behind it, and a learner that only packs. On a GPU this is what keeps it waiting.

    python benchmarks/host.py [--steps 8] [--problems 64] [--group 8] [--profile cumtime]
    python benchmarks/host.py --gpu 0.75 0.003 0.004 100     as if a GPU took so long: how well the two overlap

Takes half a minute on one core. To compare two versions, run both at once, on a core each, and swapped. `--gpu` has
the milliseconds of a decode step, of each of its rows, of each token of a prefill, and of an update; those above are
about SmolLM2's on an H200. Then the seconds of a step are printed, too, and how many of them the host waited for the
GPU. Nobody waits for the records then, as in a training, so that a step's CPU time may have some of the step before.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import hashlib
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.algo.batch import Batch
from palestra.algo.batching import pack
from palestra.algo.step_loss import StepLoss
from palestra.core import phases as phases_module
from palestra.core.config import RunConfig
from palestra.core.phases import phases
from palestra.core.run_folder import RunFolder
from palestra.core.weights import Weights
from palestra.engine import engine as engine_module
from palestra.engine.cuda.prefill import PrefillBuffers, PrefillShape
from palestra.engine.cuda.runner import CudaRunner, DecodeShape, Graph
from palestra.engine.sampler import SamplingRow
from palestra.engine.session import Chunk, Job
from palestra.envs.library.calculator import Calculator, CalculatorConfig
from palestra.envs.running import RunningEnv
from palestra.learner.base import noop
from palestra.models.loading import load_model
from palestra.policy.local import LocalPolicy
from palestra.tracking.jsonl import JsonlTracker
from palestra.train.loop import Training
from palestra.train.setup import interpreter_for_many_rollouts
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher

SETTINGS = {"rollout.max_new_tokens": 96, "rollout.max_tool_rounds": 2, "checkpoint.every": 0, "train.learning_rate": 1}
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call><|im_end|>'
KEY = 24  # tokens at the end of a prompt that tell problems apart
PHASES = ("template", "planning", "prefill", "decode", "learner", "packing", "preparing", "publishing", "records")
RIGHT = 0.07  # of the answers: about as many groups have signal as in the training of benchmarks/training.py


class Scripts:
    """What each rollout says, by its prompt and its seed: the right call or another one, then an answer."""

    def __init__(self, parts: Parts, environment: RunningEnv) -> None:
        self._tokenizer = parts.tokenizer
        self._problems = {}
        for problem in environment.problems("train"):
            episode = environment.open(problem)
            prompt = parts.chat.prompt(episode.prompt, [tool.schema for tool in episode.tools])
            call = self._ids(CALL % problem.row["expression"])
            self._problems[tuple(prompt.token_ids[-KEY:].tolist())] = call, self._ids(f"{problem.expect}.<|im_end|>")
        self._wrong = [self._ids(f"{number}.<|im_end|>") for number in range(100)]
        self._long = self._ids("The calculator says that the result of all this is " * 8)
        self._answers: dict[int, list[int]] = {}  # by the session's number

    def turn(self, job: Job) -> list[int]:
        assert job.params is not None
        session, rng = job.session, random.Random(job.params.seed)
        known = self._problems.get(tuple(session.token_ids[job.start - KEY : job.start]))
        if known is not None:
            call, self._answers[session.number] = known
            return call if rng.random() < 0.5 else self._ids(CALL % f"{rng.randint(1, 99)} * {rng.randint(1, 9999)}")
        answer = self._answers[session.number] if rng.random() < RIGHT else rng.choice(self._wrong)
        words = min(int(rng.expovariate(1 / 6)), len(self._long))
        return (self._long[:words] + answer)[: job.params.max_new_tokens]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass
class PretendedGpu:
    """Does its work one after the other, in the time that it is thought to take."""

    step_ms: float
    row_ms: float
    token_ms: float
    update_ms: float
    free_at: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    decode_steps: int = 0

    def launch(self, ms: float) -> None:
        self.free_at = max(time.perf_counter(), self.free_at) + ms / 1000
        self.busy_s += ms / 1000

    def wait(self, until: float) -> None:
        left = until - time.perf_counter()
        if left > 0:
            self.waited_s += left
            time.sleep(left)


class ScriptedRunner(CudaRunner):
    """The GPU's runner on the CPU, with a script in the place of the model."""

    scripts: Scripts
    gpu: PretendedGpu

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns: dict[Job, list[int]] = {}
        self._left = torch.zeros(0, dtype=torch.int32)
        self._emitted, self._state.emitted = self._state.emitted, self._wait_and_read  # type: ignore[method-assign]
        self._state.look = self._look  # type: ignore[method-assign]

    def _look(self, number: int) -> Callable[[], bool]:
        at, left = self.gpu.free_at, self._left

        def ended() -> bool:
            self.gpu.wait(at)
            return not left.all()

        return ended

    def _wait_and_read(self, steps: int) -> Any:
        self.gpu.wait(self.gpu.free_at)
        return self._emitted(steps)

    def _load(self, chunks: Sequence[Chunk], rows: Sequence[SamplingRow], steps: int) -> tuple[DecodeShape, int]:
        shape, steps = super()._load(chunks, rows, steps)
        with phases("script"):
            said = [self._said(chunk.job)[len(chunk.job.logprobs) :] for chunk in chunks]
            self._left = torch.tensor([len(ids) for ids in said], dtype=torch.int32)
            padded = [(ids + [-1] * steps)[:steps] for ids in said]
            self._state.tokens[:steps, : len(chunks)] = torch.tensor(padded, dtype=torch.int32).T
            self._state.logprobs.fill_(-0.5)
        return shape, steps

    def _said(self, job: Job) -> list[int]:
        if job not in self._turns:
            self._turns[job] = self.scripts.turn(job)
        return self._turns[job]

    def _decode_step(self, shape: DecodeShape) -> Any:
        self.gpu.launch(self.gpu.step_ms + self.gpu.row_ms * shape.rows)
        self.gpu.decode_steps += 1
        with phases("script"):
            self._left = (self._left - 1).clamp(min=0)
            self._state.left[: len(self._left)] = self._left

    def _copy_pages(self) -> None:
        self._copies = {}

    def _prefill_step(self, buffers: PrefillBuffers, shape: PrefillShape) -> None:
        self.gpu.launch(self.gpu.step_ms + self.gpu.token_ms * shape.tokens)

    def _graph(self, shape: DecodeShape | PrefillShape, forward: Any) -> Graph:
        return Graph(forward, torch.zeros(0))

    def weights_changed(self) -> None:
        self._turns.clear()


class Zeros:
    """What a learner found that computed nothing."""

    def __init__(self, batch: Batch) -> None:
        self._tokens = len(batch.token_ids)

    def logprobs(self) -> np.ndarray:
        return np.zeros(self._tokens, np.float32)

    entropies = logprobs

    def metrics(self) -> dict[str, float]:
        return {"loss": 0.0}


@dataclass
class PackingLearner:
    """Packs what it is given, as the real one does before its first kernel."""

    gpu: PretendedGpu

    def forward_backward(self, batch: Batch, loss: StepLoss) -> Zeros:
        with phases("packing"):
            pack(batch, max_tokens=16384, echo=loss.echo_coefficient > 0)
        return Zeros(batch)

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Callable[[], None] = noop) -> float:
        self.gpu.launch(self.gpu.update_ms)
        host_work()
        self.gpu.wait(self.gpu.free_at)
        return 1.0

    def weights(self, version: int) -> Weights:
        return Weights(version, dict)


class Counter(Watcher):
    """Counts the rollouts that were drawn: a step uses only those of the groups that it needs."""

    drawn = 0

    def rollout(self) -> None:
        self.drawn += 1


def build(options: argparse.Namespace, folder: Path, counter: Counter) -> Training:
    config = RunConfig.build(
        SETTINGS, {"train.problems_per_step": options.problems, "rollout.group_size": options.group}
    )
    loaded = load_model("palestra/tiny", device="cpu")
    environment = RunningEnv(Calculator(CalculatorConfig(shots=2, operations=2)))
    engine_module.build_runner = ScriptedRunner  # type: ignore[assignment]
    policy = LocalPolicy(
        loaded.model, loaded.tokenizer, self_check=False, page_size=64, max_running=1024, tokens_per_step=16384
    )
    runner = asyncio.Runner()
    parts = Parts(config, policy, loaded.tokenizer, runner, counter)
    policy.engine.runner.scripts = Scripts(parts, environment)  # type: ignore[attr-defined]
    source = EnvironmentTask(environment).source(parts)
    tracker = JsonlTracker(RunFolder(folder))
    return Training(config, source, policy, PackingLearner(ScriptedRunner.gpu), tracker, 1 << 30, runner=runner)  # type: ignore[arg-type]


def measured(training: Training, counter: Counter) -> dict[str, float]:
    """Milliseconds of CPU a rollout that one step drew: all, of the main thread by part, and of the other threads."""
    drawn, cpu, own = counter.drawn, time.process_time(), time.thread_time()
    began = time.perf_counter()
    metrics = training.step()
    seconds = time.perf_counter() - began
    if not ScriptedRunner.gpu.update_ms:
        training.tracker.flush()
    cpu, own = time.process_time() - cpu, time.thread_time() - own
    parts = {name: metrics.get(f"{name}_seconds", 0.0) for name in PHASES}
    script = metrics["script_seconds"]
    agents = own - script - sum(parts.values())
    found = {"all": cpu - script, "other threads": cpu - own, "agents and loop": agents, **parts}
    a_rollout = {name: 1e3 * seconds / (counter.drawn - drawn) for name, seconds in found.items()}
    return a_rollout | {"step_s": seconds - script, "sampling_s": metrics["sample_seconds"] - script}


def checksum(folder: Path) -> str:
    """Of all records but their times: the same before and after a change of how they come about."""
    digest = hashlib.sha256()
    for line in RunFolder(folder).rollouts_file.read_text().splitlines():
        row = json.loads(line)
        times = [row.pop("seconds"), row.pop("tool_seconds")]
        times += [result.pop("seconds", None) for result in row["tool_results"]]
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument(
        "--gpu",
        type=float,
        nargs=4,
        metavar="MS",
        help="of a decode step, a row, a token of a prefill, an update",
    )
    parser.add_argument("--profile", choices=("cumtime", "tottime"), help="print the functions that took most of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    phases_module.perf_counter = time.thread_time  # type: ignore[attr-defined]  # CPU time: others may use the core, too
    folder, counter, profile = Path(tempfile.mkdtemp()), Counter(), cProfile.Profile()
    ScriptedRunner.gpu = gpu = PretendedGpu(*(options.gpu or (0.0,) * 4))
    training = build(options, folder, counter)
    with interpreter_for_many_rollouts():
        for _ in range(2):
            measured(training, counter)
        before, gpu.busy_s, gpu.waited_s, gpu.decode_steps = counter.drawn, 0.0, 0.0, 0
        if options.profile:
            profile.enable()
        rows = [measured(training, counter) for _ in range(options.steps)]
        profile.disable()
        training.tracker.flush()
    print(f"{(counter.drawn - before) / options.steps:.0f} rollouts a step; records {checksum(folder)}")
    steps, sampling = ([row.pop(name) for row in rows] for name in ("step_s", "sampling_s"))
    if options.gpu:
        shares = {"all": sum(steps), "sampling": sum(sampling), "GPU busy": gpu.busy_s, "waited for it": gpu.waited_s}
        print({f"{name}, s a step": round(seconds / options.steps, 3) for name, seconds in shares.items()}, end=" ")
        print(f"{gpu.decode_steps / options.steps:.0f} decode steps")
    quickest = min(rows, key=lambda row: row["all"])  # the one that others on the machine disturbed least
    print({name: round(ms, 3) for name, ms in quickest.items()})
    if options.profile:
        pstats.Stats(profile).sort_stats(options.profile).print_stats(60)


if __name__ == "__main__":
    main()
