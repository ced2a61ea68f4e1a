"""The Tinker server beside the learner and engine that it drives; two clients at once beside one after the other.

python benchmarks/tinker_server.py           Qwen3-0.6B's shape on a CUDA GPU: 64 × 512 tokens, sampled and trained
python benchmarks/tinker_server.py --tiny    the same script with a tiny shape, on whatever is there

On a GPU one to two minutes to compile and warm up, then less than one. The server runs in this process, as
`palestra tinker` would, and its client in another: plain HTTP, without the SDK, so that what is measured is the
server. Prints one line of JSON for each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner import build
from tinker_client import rows

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Sample, SamplingParams
from palestra.engine.engine import Engine
from palestra.faces.cli.tinker import SWITCH_S
from palestra.learner.local import LocalLearner
from palestra.models.loading import LoadedModel, load_model
from palestra.serve.web import Server, open_port, url_of
from palestra.tinker import server as tinker_server
from palestra.tinker import service as tinker_service
from palestra.tinker.base_model import AdapterSpec, BaseModel
from palestra.tinker.sampler import Sampler
from palestra.tinker.trainee import Trainee

PROMPT = 16
RANK = 32
MODEL = "benchmark"


def report(**row: Any) -> None:
    print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}), flush=True)


def make_base(shape: str, device: str) -> BaseModel:
    """A model of random weights with the embedded model's tokenizer."""
    model = build(shape, torch.bfloat16 if device == "cuda" else torch.float32, device)
    return BaseModel(LoadedModel(model, load_model("palestra/tiny", device="cpu").tokenizer, MODEL, MODEL))


# without the server


def direct_sampling(base: BaseModel, data: list[np.ndarray], repeats: int) -> float:
    """Seconds of the engine itself."""
    engine = Engine(base.module(AdapterSpec(RANK)).eval().requires_grad_(False), base.tokenizer)
    params = [SamplingParams(len(row) - 1, seed=i) for i, row in enumerate(data)]

    def sample() -> None:
        sessions = [engine.open(row[:PROMPT].tolist()) for row in data]
        engine.sample(sessions, params)
        for session in sessions:
            engine.close(session)

    return best(sample, repeats)


def direct_training(base: BaseModel, data: list[np.ndarray], repeats: int) -> float:
    """Seconds of the learner itself: gradients and a step."""
    config = RunConfig.build({"lora": {"r": RANK}, "rollout": {"temperature": 1.0}})
    learner = LocalLearner(base.module(AdapterSpec(RANK)).train(), config=config)
    size = len(data[0])
    samples = [Sample(ids, np.arange(size) > 0, np.zeros(size, bool), np.full(size, -8.0), 0.5) for ids in data]
    loss = StepLoss.of(Batch.of(samples), Objective(loss="dapo"), max_completion_length=size - 1)

    def train() -> None:
        learner.forward_backward(Batch.of(samples), loss)
        learner.optim_step(1e-5, max_grad_norm=1.0)

    return best(train, repeats)


def best(work: Callable[[], None], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# with it


@dataclass
class Spans:
    """When the server was inside of which function, on the clock that all processes share."""

    found: list[tuple[str, float, float]] = field(default_factory=list)

    def watch(self, owner: Any, name: str, label: str) -> None:
        whole = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return whole(*arguments, **options)
            finally:
                self.found.append((label, began, time.monotonic()))

        setattr(owner, name, timed)

    def within(self, began: float, ended: float) -> dict[str, list[tuple[float, float]]]:
        chosen: dict[str, list[tuple[float, float]]] = {}
        for label, first, last in list(self.found):
            if began <= first and last <= ended:
                chosen.setdefault(label, []).append((first, last))
        return chosen


def watch_server() -> Spans:
    spans = Spans()
    spans.watch(tinker_server, "read_forward_backward", "parse")
    spans.watch(tinker_service, "write_outputs", "write")
    spans.watch(tinker_service.Service, "sample", "arrive")
    spans.watch(Sampler, "_load", "load")
    spans.watch(Sampler, "_answer", "answer")
    spans.watch(Engine, "submit", "submit")
    for name in ("snapshot", "check", "forward_backward", "optim_step"):
        spans.watch(Trainee, name, name)
    spans.watch(LocalLearner, "_pack", "pack")
    return spans


def sampling_parts(spans: dict[str, list[tuple[float, float]]], began: float, ended: float) -> dict[str, float]:
    """Where the seconds of one round went, from the first request to the last answer."""
    arrived = [last for _, last in spans["arrive"]]
    submitted, answered = min(spans["submit"])[0], max(spans["answer"])[1]
    return {
        "pin_s": min(arrived) - began, "requests_arrive_s": max(arrived) - min(arrived),
        "burst_and_load_s": submitted - max(arrived), "load_s": total(spans.get("load", [])),
        "engine_s": answered - submitted, "answers_travel_s": ended - answered,
    }  # fmt: skip


def training_parts(spans: dict[str, list[tuple[float, float]]], began: float, ended: float) -> dict[str, float]:
    sums = {label: total(spans.get(label, [])) for label in ("parse", "check", "pack", "write")}
    compute = total(spans["forward_backward"]) + total(spans["optim_step"])
    return {
        "parse_s": sums["parse"], "check_s": sums["check"], "pack_s": sums["pack"],
        "compute_s": compute - sums["check"] - sums["pack"], "write_s": sums["write"],
        "queue_and_wire_s": ended - began - compute - sums["parse"] - sums["write"],
    }  # fmt: skip


def total(spans: list[tuple[float, float]]) -> float:
    return sum(last - first for first, last in spans)


@contextmanager
def served(base: BaseModel, folder: Path) -> Iterator[str]:
    os.environ["PALESTRA_HOME"] = str(folder / "home")
    sys.setswitchinterval(SWITCH_S)
    port = open_port("127.0.0.1", 0, None)
    server = Server(tinker_server.tinker_app(tinker_service.Service([base], folder / "runs")))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[port])), daemon=True)
    thread.start()
    try:
        yield url_of(port)
    finally:
        server.should_exit = True
        thread.join(20)


def measure(url: str, options: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    """What the client printed: a line for each round."""
    client_file = Path(__file__).with_name("tinker_client.py")
    sizes = (options.rows, options.length, vocabulary, PROMPT, RANK, options.repeats)
    command = [sys.executable, str(client_file), url, MODEL, *map(str, sizes)]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            found.append(json.loads(line))
            if found[-1]["kind"] == "warm":
                report(what="warm-up of a client", seconds=found[-1]["ended"] - found[-1]["began"])
    if client.returncode:
        raise SystemExit(f"the client failed with exit status {client.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    base = make_base("tiny" if options.tiny else "0.6B", device)
    report(what="model", device=device, seconds=time.monotonic() - began)
    tokens, data = options.rows * options.length, rows(options.rows, options.length, base.vocabulary)
    began = time.monotonic()
    sampling = direct_sampling(base, data, options.repeats)
    free()
    training = direct_training(base, data, options.repeats)
    report(what="direct, warm-up included", seconds=time.monotonic() - began)
    report(what="direct", sample_s=sampling, train_s=training, tokens_per_s=2 * tokens / (sampling + training))
    free()
    spans = watch_server()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, served(base, Path(folder)) as url:
        found = measure(url, options, base.vocabulary)
    rounds = {kind: min((r for r in found if r["kind"] == kind), key=lambda r: r["ended"] - r["began"])
              for kind in ("sample", "train", "apart", "together")}  # fmt: skip
    seconds = {kind: row["ended"] - row["began"] for kind, row in rounds.items()}
    for kind, parts in (("sample", sampling_parts), ("train", training_parts)):
        row = rounds[kind]
        limits = (row["began"], row["ended"])
        report(what=f"server, {kind}", seconds=seconds[kind], bytes_in=row["sent"], bytes_out=row["received"],
               **parts(spans.within(*limits), *limits))  # fmt: skip
    served_s = seconds["sample"] + seconds["train"]
    report(what="server", sample_s=seconds["sample"], train_s=seconds["train"], tokens_per_s=2 * tokens / served_s)
    report(what="server / direct", ratio=(sampling + training) / served_s, expected=0.8)
    report(what="two at once / one after the other", ratio=seconds["apart"] / seconds["together"], expected=1.3)


if __name__ == "__main__":
    main()
