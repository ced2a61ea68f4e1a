"""A training that samples from a real `vllm serve`, and one from our own engine: how far sampler and learner differ.

    python benchmarks/vllm_server.py [--lora 16] [--steps 3] [--model palestra/tiny]      3 minutes on a GPU, 6 on a CPU

vLLM must be importable here. It serves the embedded model in bfloat16 on the GPU that the training has too, with a
share of its memory; weights are synchronised after each step, with `--lora` as an adapter of that rank. Without a GPU
all is in float32, with half the problems.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from palestra.core.run_folder import RunFolder
from palestra.export.hf import save_hf
from palestra.models.loading import load_model
from palestra.policy.vllm_common import rank_limit
from palestra.train.evaluation import read_evaluation

ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
RUN = [
    *("--train.problems_per_step", "16" if ON_GPU else "8", "--rollout.group_size", "8"),
    *("--rollout.max_new_tokens", "96", "--eval.cases", "60" if ON_GPU else "40"),
    *("--checkpoint.every", "0", "--model.dtype", DTYPE),
]
RATE = ["--train.learning_rate", "0.003"]  # of an adapter to the embedded model, so that a few steps show something
WHOLE = ["--worker-extension-cls", "palestra.policy.vllm_worker.PalestraWorker"]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
} | ({} if ON_GPU else {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lora", type=int, default=0, help="the rank of an adapter; 0 trains all weights")
    parser.add_argument("--backend", default="FLASH_ATTN", help="attention on a GPU")
    parser.add_argument("--model", default="palestra/tiny")
    parser.add_argument("--wait", type=float, default=150.0, help="seconds until the server must answer")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    run = [*RUN, "--train.max_steps", str(arguments.steps), "--model.name", arguments.model]
    run += ["--lora.r", str(arguments.lora), *RATE] if arguments.lora else []
    rows = [("our own engine", train(work / "own", run))]
    loaded = load_model(arguments.model)
    server, url = serve(save_hf(loaded.model, loaded.tokenizer, work / "model"), arguments, work / "vllm.log")
    try:
        from_vllm = ["--vllm.mode", "server", "--vllm.url", url, "--rollout.weights_folder", str(work / "weights")]
        rows.append(("vllm serve", train(work / "vllm", [*run, *from_vllm])))
    finally:
        server.terminate()
        server.wait(30)
    print("| sampler | held out before | after | gap, mean | gap, maximum | a step, s |\n" + "| --- " * 6 + "|")
    for name, found in rows:
        numbers = f"{found['mean']:.2g} | {found['max']:.2g} | {found['s']:.2f}"
        print(f"| {name} | {found['before']} | {found['after']} | {numbers} |")


def serve(folder: Path, arguments: argparse.Namespace, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port", str(port)]
    command += ["--dtype", DTYPE, "--enforce-eager", "--max-model-len", "2048", "--logprobs-mode", "processed_logprobs"]
    command += ["--enable-lora", "--max-lora-rank", str(rank_limit(arguments.lora))] if arguments.lora else WHOLE
    if ON_GPU:
        command += ["--gpu-memory-utilization", "0.2", "--attention-config.backend", arguments.backend]
    else:
        command += ["--no-enable-chunked-prefill"]  # docs/scaling.md
    environment = {**os.environ, **ENVIRONMENT}
    server = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment)
    began = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() - began > arguments.wait:
                server.kill()
                raise SystemExit(f"vllm serve did not come up; the end of {log}:\n{log.read_text()[-6000:]}") from None
            time.sleep(1)
            continue
        print(f"vllm serve answers after {time.monotonic() - began:.0f} s", flush=True)
        return server, f"http://127.0.0.1:{port}"


def train(folder: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "palestra", "train", "--folder", str(folder), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row for row in metrics if "sampler_gap_mean" in row]
    rates = {when: read_evaluation(RunFolder(folder).eval_file(when)).pass_rate for when in ("before", "after")}
    return {
        **{when: f"{rate.passed} of {rate.n}" for when, rate in rates.items()},
        "mean": max(row["sampler_gap_mean"] for row in gaps),
        "max": max(row["sampler_gap_max"] for row in gaps),
        "s": statistics.median(row["sample_seconds"] + row["train_seconds"] for row in gaps),
    }


if __name__ == "__main__":
    main()
