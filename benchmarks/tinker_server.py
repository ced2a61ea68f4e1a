"""The Tinker server beside the learner and engine that it drives; two clients at once beside one after the other.

python benchmarks/tinker_server.py           Qwen3-0.6B's shape on a CUDA GPU: 64 × 512 tokens, sampled and trained
python benchmarks/tinker_server.py --tiny    the same script with a tiny shape, on whatever is there

The client is plain HTTP, without the SDK. Prints one line of JSON for each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from learner import build

from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Sample, SamplingParams
from palestra.engine.engine import Engine
from palestra.learner.base import Batch
from palestra.learner.local import LocalLearner
from palestra.tinker.base_model import AdapterSpec, BaseModel
from palestra.tinker.messages import Datum, ForwardBackwardRequest, Tensor, write_forward_backward

PROMPT = 16
SPEC = AdapterSpec(32)
TOKENIZER = Path(__file__).parents[1] / "src" / "palestra" / "models" / "tiny"


def report(**row: Any) -> None:
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}), flush=True)


def make_folder(shape: str, device: str, folder: Path) -> Path:
    """A model of random weights with a tokenizer beside it, as any model on disk."""
    model = build(shape, torch.bfloat16 if device == "cuda" else torch.float32, device)
    model.save_pretrained(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TOKENIZER / name).exists():
            shutil.copy(TOKENIZER / name, folder / name)
    return folder


def rows(count: int, length: int, vocabulary: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocabulary, length + 1) for _ in range(count)]


# without the server


def direct(base: BaseModel, count: int, length: int, repeats: int) -> tuple[float, float]:
    """Seconds of sampling and of gradients with a step, by the engine and the learner themselves."""
    engine = Engine(base.module(SPEC).eval().requires_grad_(False), base.tokenizer)
    params = [SamplingParams(length, seed=i) for i in range(count)]
    prompts = [row[:PROMPT].tolist() for row in rows(count, length, base.vocabulary)]

    def sample() -> None:
        sessions = [engine.open(prompt) for prompt in prompts]
        engine.sample(sessions, params)
        for session in sessions:
            engine.close(session)

    sampling = best(sample, repeats)
    engine.sleep()  # its KV memory is the learner's now
    free()
    config = RunConfig.build({"lora": {"r": SPEC.rank}, "rollout": {"temperature": 1.0}})
    learner = LocalLearner(base.module(SPEC).train(), config=config)
    samples = [
        Sample(ids, np.arange(length + 1) > 0, np.zeros(length + 1, bool), np.full(length + 1, -8.0), 0.5)
        for ids in rows(count, length, base.vocabulary)
    ]
    loss = StepLoss.of(samples, Objective(loss="dapo"), max_completion_length=length)

    def train() -> None:
        learner.forward_backward(Batch(samples), loss)
        learner.optim_step(1e-5, max_grad_norm=1.0)

    return sampling, best(train, repeats)


def best(work: Any, repeats: int) -> float:
    work()
    found = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# with it


class Client:
    """One training over HTTP."""

    def __init__(self, url: str, model: str, count: int, length: int, vocabulary: int) -> None:
        context = ssl.create_default_context()  # making one for each client would take longer than a step

        def connect() -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=600, verify=context)

        self._http = connect()
        self._sampling = [connect() for _ in range(count)]  # httpx's pool takes milliseconds with 64 requests at once
        self._model_name, self._count, self._length = model, count, length
        self._rows = rows(count, length, vocabulary)
        self._seq = 0

    async def start(self) -> None:
        self._session = (await self._json("create_session", {}))["session_id"]
        lora = {"session_id": self._session, "model_seq_id": 0, "base_model": self._model_name}
        made = await self._json("create_model", {**lora, "lora_config": {"rank": SPEC.rank}})
        self._model = (await self._wait(made)).json()["model_id"]

    async def sample(self) -> float:
        began = time.perf_counter()
        pinned = {"model_id": self._model, "seq_id": self._next(), "sampling_session_seq_id": self._seq}
        session = (await self._wait(await self._json("save_weights_for_sampler", pinned))).json()["sampling_session_id"]
        await asyncio.gather(*(self._one(session, i, row) for i, row in enumerate(self._rows)))
        return time.perf_counter() - began

    async def train(self) -> float:
        began = time.perf_counter()
        half = len(self._rows) // 2
        promises = [
            await self._fb(part, number)
            for part, number in ((self._rows[:half], self._next()), (self._rows[half:], self._next()))
        ]
        step = {"model_id": self._model, "seq_id": self._next(), "adam_params": {"learning_rate": 1e-5}}
        promises.append(await self._json("optim_step", step))
        for promise in promises:
            await self._wait(promise)
        return time.perf_counter() - began

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.sample()
            await self.train()

    async def _one(self, session: str, number: int, row: np.ndarray) -> None:
        body = {
            "sampling_session_id": session, "seq_id": number, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": row[:PROMPT].tolist()}]},
            "sampling_params": {"max_tokens": self._length, "seed": number, "stop": []},
        }  # fmt: skip
        http = self._sampling[number]
        await self._wait(await self._json("asample", body, http), http)

    async def _fb(self, part: list[np.ndarray], seq_id: int) -> Any:
        size = (self._length,)
        data = [
            Datum(
                ids[:-1].astype(np.int32),
                {
                    "target_tokens": Tensor(ids[1:], size),
                    "logprobs": Tensor(np.full(size, -8.0, np.float32), size),
                    "advantages": Tensor(np.full(size, 0.5, np.float32), size),
                },
            )
            for ids in part
        ]
        body = write_forward_backward(ForwardBackwardRequest(self._model, seq_id, data, "ppo"))
        headers = {"content-type": "application/x-protobuf"}
        return (await self._http.post("forward_backward", content=body, headers=headers)).raise_for_status().json()

    async def _json(self, path: str, body: Any, http: httpx.AsyncClient | None = None) -> Any:
        return (await (http or self._http).post(path, json=body)).raise_for_status().json()

    async def _wait(self, promise: Any, http: httpx.AsyncClient | None = None) -> httpx.Response:
        while True:
            asked = {"request_id": promise["request_id"]}
            answer = await (http or self._http).post("retrieve_future", json=asked)
            if "json" not in answer.headers["content-type"]:
                return answer.raise_for_status()
            found = answer.raise_for_status().json()
            if "error" in found:
                raise RuntimeError(found["error"])
            if found.get("type") != "try_again":
                return answer

    def _next(self) -> int:
        self._seq += 1
        return self._seq


@contextmanager
def served(model: Path, device: str, folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "palestra", "tinker", str(model), "--port", "0", "--device", device]
    environment = {**os.environ, "PALESTRA_HOME": str(folder / "home")}
    with subprocess.Popen(
        [*command, "--output_dir", str(folder / "runs")], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if "http://" in line:
                    yield line.split()[-1]
                    break
        finally:
            server.terminate()


async def measure(
    url: str, model: str, options: argparse.Namespace, vocabulary: int
) -> tuple[float, float, float, float]:
    first, second = (Client(url, model, options.rows, options.length, vocabulary) for _ in range(2))
    for client in (first, second):
        await client.start()
        await client.steps(1)  # engines are built and graphs captured
    sampling = min([await first.sample() for _ in range(options.repeats)])
    training = min([await first.train() for _ in range(options.repeats)])
    began = time.perf_counter()
    await first.steps(options.repeats)
    await second.steps(options.repeats)
    apart = time.perf_counter() - began
    began = time.perf_counter()
    await asyncio.gather(first.steps(options.repeats), second.steps(options.repeats))
    return sampling, training, apart, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_folder("tiny" if options.tiny else "0.6B", device, folder / "model")
        base = BaseModel.load(str(model), device=device)
        vocabulary, tokens = base.vocabulary, options.rows * options.length
        sampling, training = direct(base, options.rows, options.length, options.repeats)
        report(what="direct", sample_s=sampling, train_s=training, tokens_per_s=2 * tokens / (sampling + training))
        del base
        free()
        with served(model, device, folder) as url:
            sampled, trained, apart, together = asyncio.run(measure(url, str(model), options, vocabulary))
        report(what="server", sample_s=sampled, train_s=trained, tokens_per_s=2 * tokens / (sampled + trained))
        report(what="server / direct", ratio=(sampling + training) / (sampled + trained), expected=0.8)
        report(what="two adapters at once / one after the other", ratio=apart / together, expected=1.3)


if __name__ == "__main__":
    main()
