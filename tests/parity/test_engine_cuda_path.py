"""The CUDA path against the CPU path: the same tokens. Runs in Triton's interpreter, or on a GPU.

Skipped where Triton is not installed. The interpreter is slow, so the model is one layer and the turns short.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import palestra.engine.engine as engine_module
from palestra.core.types import SamplingParams
from palestra.engine.cuda_runner import CudaRunner

config = AutoConfig.for_model(
    "gemma2", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, sliding_window=7,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
device = "cuda" if torch.cuda.is_available() else "cpu"
prompt = [5, 17, 9, 23, 61, 3, 42, 8, 7, 12, 50, 31, 56, 44, 8, 7, 15, 60, 29]

class EvenBehindOdd:  # a grammar: behind an odd id comes an even one
    odd = False

    def start(self):
        return EvenBehindOdd()

    def allowed(self):
        return bytes([0b01010101] * 8) if self.odd else None

    def accept(self, token_id):
        self.odd = token_id % 2 == 1

def turns():
    engine = engine_module.Engine(model, page_size=16, kv_memory_gib=0.001, max_running=4, self_check=False)
    group = [*engine.fork(engine.open(prompt), 2), engine.open(prompt[:4])]
    out = []
    for more in ([], [4, 5, 6]):
        for session in group:
            engine.append(session, more)
        params = [
            SamplingParams(5, temperature=0.0), SamplingParams(4, seed=7), SamplingParams(5, 0.7, stop_token_ids=(1,)),
        ]
        out += engine.sample(group, params)
    held = SamplingParams(6, seed=3, grammar=EvenBehindOdd())
    out += engine.sample(group, [held, SamplingParams(6, seed=3), held])
    ids = out[-1].token_ids
    assert not any(a % 2 and b % 2 for a, b in zip(ids, ids[1:])), ids
    for session in group:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages
    return out

expected = turns()
engine_module.build_runner = CudaRunner
model.to(device)
for a, b in zip(expected, turns(), strict=True):
    assert a.token_ids == b.token_ids and a.finish == b.finish, (a, b)
    assert all(abs(x - y) < 1e-4 for x, y in zip(a.logprobs, b.logprobs)), (a, b)
print("SAME")
"""


def test_cuda_path_samples_what_the_cpu_path_samples() -> None:
    import torch

    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.stdout.endswith("SAME\n"), done.stderr[-3000:]
