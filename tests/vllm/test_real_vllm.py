"""The real vLLM, on this machine's CPU: `make test-vllm VLLM_PYTHON=…/bin/python`. Skipped where that is not given."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from served import free_port

from palestra.core.config_sections import LoraSection
from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.vllm.server import VllmServerPolicy
from palestra.learner.lora import add_lora
from palestra.models.export.hf import save_hf
from palestra.models.loading import LoadedModel, load_model
from palestra.policy.local import token_logprobs

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
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
RUN = [
    *("--train.max_steps", "3", "--train.problems_per_step", "4", "--rollout.group_size", "4"),
    *("--rollout.max_new_tokens", "80", "--eval.cases", "8", "--checkpoint.every", "1"),
]
LORA = ["--lora.r", "8", "--train.learning_rate", "0.003"]
MAX_GAP = 1e-3  # nats, float32; seen: 4e-6


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("palestra/tiny")


@pytest.fixture(scope="module")
def folder(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tiny.model, tiny.tokenizer, tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder, "--worker-extension-cls", "palestra.extras.vllm.worker.PalestraWorker") as url:
        yield url


@pytest.fixture(scope="module")
def lora_url(folder: Path) -> Iterator[str]:
    with served(folder, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2") as url:
        yield url


@contextmanager
def served(folder: Path, *more: str) -> Iterator[str]:
    """`vllm serve` on the embedded model; without chunked prefill, see docs/scaling.md."""
    port = free_port()
    options = ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    options += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs"]
    command = [str(Path(PYTHON).with_name("vllm")), "serve", str(folder), *options, *more]
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
        shown = ("step", "sampler_gap_mean", "sampler_gap_max", "staleness_max")
        print({name: row[name] for name in shown if name in row})
    assert len(found) == 3
    assert all(row["rollout_failures"] == 0 for row in found)
    return found


def check_gap(rows: list[dict[str, float]]) -> None:
    assert max(row["sampler_gap_max"] for row in rows if "sampler_gap_max" in row) < MAX_GAP


def train_with_server(url: str, folder: Path, staleness: int, *options: str) -> None:
    rows = train(
        sys.executable, folder, *options, "--vllm.mode", "server", "--vllm.url", url,
        "--rollout.weights_folder", str(folder / "weights"), "--rollout.max_staleness", str(staleness),
    )  # fmt: skip
    assert all(row["staleness_max"] <= staleness for row in rows)
    check_gap(rows if staleness == 0 else rows[:1])  # where older weights sampled, the gap is theirs


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_embedded_model_is_trained_with_a_running_vllm(url: str, tmp_path: Path, staleness: int) -> None:
    train_with_server(url, tmp_path, staleness)


def test_the_embedded_model_is_trained_with_vllm_in_the_process(tmp_path: Path) -> None:
    check_gap(train(PYTHON, tmp_path, "--vllm.mode", "colocate", "--vllm.max_model_len", "1024"))


def test_weights_of_another_model_are_refused_by_the_real_server(url: str, tiny: LoadedModel, tmp_path: Path) -> None:
    policy = VllmServerPolicy(url, tiny.tokenizer, weights_folder=tmp_path, temperature=1.0)
    other: dict[str, Any] = {name: p.detach()[:2].clone() for name, p in tiny.model.named_parameters()}
    with pytest.raises(PalestraError, match=r"did not take new weights|other log-probabilities"):
        policy.update(Weights(1, lambda: other, tiny.model))


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_adapter_is_trained_with_a_running_vllm(lora_url: str, tmp_path: Path, staleness: int) -> None:
    train_with_server(lora_url, tmp_path, staleness, *LORA)
    assert len(httpx.get(f"{lora_url}/v1/models").json()["data"]) == 1  # no adapter is left there
    assert list((tmp_path / "weights").iterdir()) == []


def test_an_adapter_is_trained_with_vllm_in_the_process(tmp_path: Path) -> None:
    if subprocess.run([PYTHON, "-c", "import peft"], capture_output=True).returncode:
        pytest.skip("peft is not in vLLM's environment")
    check_gap(train(PYTHON, tmp_path, *LORA, "--vllm.mode", "colocate", "--vllm.max_model_len", "1024"))


def adapted(**options: Any) -> Any:
    """The embedded model with an adapter that changes what it says."""
    torch.manual_seed(0)
    model = add_lora(load_model("palestra/tiny").model, LoraSection(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    return model.eval()


@torch.no_grad()
def scale_adapter(model: Any, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(factor)


def lora_policy(url: str, tokenizer: Any, folder: Path, rank: int) -> VllmServerPolicy:
    return VllmServerPolicy(url, tokenizer, weights_folder=folder, temperature=1.0, lora_rank=rank, max_staleness=1)


def test_a_turn_that_newer_adapters_overtake_is_sampled_with_its_own_to_the_end(
    lora_url: str, tiny: LoadedModel, tmp_path: Path
) -> None:
    """Every update is checked by the same prompt, so that a prefix cache which mixes versions would be seen, too."""
    policy, model = lora_policy(lora_url, tiny.tokenizer, tmp_path, 4), adapted(r=4)
    policy.update(Weights(0, dict, model))
    prompt = tiny.tokenizer("A red lamp and a blue lamp cost", add_special_tokens=False).input_ids

    async def overtaken() -> Turn:
        turn = asyncio.create_task(policy.sample(policy.open(prompt), SamplingParams(900, temperature=1.0, seed=7)))
        await asyncio.sleep(0.5)
        for version in (1, 2):
            scale_adapter(model, 2.0)
            await asyncio.to_thread(policy.update, Weights(version, dict, model))
        assert not turn.done(), "the turn was too short to be overtaken"
        return await turn

    turn = asyncio.run(overtaken())
    scale_adapter(model, 0.25)
    pieces = token_logprobs(model, [*prompt, *turn.token_ids.tolist()], len(prompt))
    own = np.asarray([value for piece in pieces for value in piece.logprobs])
    assert (len(own), set(turn.versions.tolist())) == (900, {0})
    gap = float(np.abs(own - turn.logprobs).max())
    print({"tokens": len(own), "largest gap": gap})
    assert gap < MAX_GAP
    policy.release()


def test_what_the_real_server_does_not_load_is_told_with_the_remedy(
    url: str, lora_url: str, tiny: LoadedModel, tmp_path: Path
) -> None:
    def refused(where: str, rank: int, words: str, module: Any) -> None:
        with pytest.raises(PalestraError, match=words):
            lora_policy(where, tiny.tokenizer, tmp_path, rank).update(Weights(1, dict, module))

    too_large = r"rank 12 is greater than max_lora_rank 8.*--max-lora-rank must be.*--max-lora-rank 16"
    refused(lora_url, 12, too_large, adapted(r=12))
    refused(url, 4, "started without --enable-lora", adapted(r=4))
    other = adapted(r=4)
    with torch.no_grad():
        other.get_base_model().model.embed_tokens.weight.mul_(3)
    refused(lora_url, 4, r"other log-probabilities.*model that is trained", other)


def test_modules_that_the_real_server_does_not_adapt_are_told_with_the_remedy(
    lora_url: str, tiny: LoadedModel, tmp_path: Path
) -> None:
    model = load_model("palestra/tiny").model
    for layer in model.model.layers:
        layer.mlp.router = torch.nn.Linear(4, 4)
    module = add_lora(model, LoraSection(r=4, target_modules=["q_proj", "router"]))
    with pytest.raises(PalestraError, match=r"expected target modules.*router.*lora\.target_modules"):
        lora_policy(lora_url, tiny.tokenizer, tmp_path, 4).update(Weights(1, dict, module))
