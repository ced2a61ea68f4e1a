"""The real vLLM, on this machine's CPU: `make test-vllm VLLM_PYTHON=…/bin/python`. Skipped where that is not given."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from palestra.core.errors import PalestraError
from palestra.core.weights import Weights
from palestra.export.hf import save_hf
from palestra.models.loading import LoadedModel, load_model
from palestra.policy.vllm_server import VllmServerPolicy

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is the Python of an environment with vLLM"),
    pytest.mark.timeout(1500),
]
SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(SOURCE),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
RUN = [
    *("--train.max_steps", "3", "--train.problems_per_step", "4", "--rollout.group_size", "4"),
    *("--rollout.max_new_tokens", "80", "--eval.cases", "8", "--checkpoint.every", "1"),
]
MAX_GAP = 1e-3  # nats, float32; seen: 4e-6


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("palestra/tiny")


@pytest.fixture(scope="module")
def url(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` on the embedded model; without chunked prefill, see docs/scaling.md."""
    folder = save_hf(tiny.model, tiny.tokenizer, tmp_path_factory.mktemp("vllm") / "model")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    options += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs"]
    options += ["--worker-extension-cls", "palestra.policy.vllm_worker.PalestraWorker"]
    command = [str(Path(PYTHON).with_name("vllm")), "serve", str(folder), *options]
    with (folder.parent / "log").open("w") as log:
        server = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 900
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, (folder.parent / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def train(python: str, folder: Path, *options: str) -> list[dict[str, float]]:
    """`palestra train` of the demo; the metrics of its steps."""
    command = [python, "-m", "palestra", "train", "--folder", str(folder / "run"), *RUN, *options]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if "sample_seconds" in row]
    for row in found:
        print(
            {
                name: row[name]
                for name in ("step", "sampler_gap_mean", "sampler_gap_max", "staleness_max")
                if name in row
            }
        )
    return found


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_embedded_model_is_trained_with_a_running_vllm(url: str, tmp_path: Path, staleness: int) -> None:
    rows = train(
        sys.executable, tmp_path, "--vllm.mode", "server", "--vllm.url", url,
        "--rollout.weights_folder", str(tmp_path / "weights"), "--rollout.max_staleness", str(staleness),
    )  # fmt: skip
    assert len(rows) == 3
    assert all(row["rollout_failures"] == 0 and row["staleness_max"] <= staleness for row in rows)
    current = rows if staleness == 0 else rows[:1]  # where older weights sampled, the gap is theirs
    assert max(row["sampler_gap_max"] for row in current if "sampler_gap_max" in row) < MAX_GAP


def test_the_embedded_model_is_trained_with_vllm_in_the_process(tmp_path: Path) -> None:
    rows = train(PYTHON, tmp_path, "--vllm.mode", "colocate", "--vllm.max_model_len", "1024")
    assert len(rows) == 3
    assert all(row["rollout_failures"] == 0 for row in rows)
    assert max(row["sampler_gap_max"] for row in rows if "sampler_gap_max" in row) < MAX_GAP


def test_weights_of_another_model_are_refused_by_the_real_server(url: str, tiny: LoadedModel, tmp_path: Path) -> None:
    policy = VllmServerPolicy(url, tiny.tokenizer, weights_folder=tmp_path, temperature=1.0)
    other: dict[str, Any] = {name: p.detach()[:2].clone() for name, p in tiny.model.named_parameters()}
    with pytest.raises(PalestraError, match=r"did not take new weights|other log-probabilities"):
        policy.update(Weights(1, lambda: other, tiny.model))
