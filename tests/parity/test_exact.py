"""`model.exact`: sampler and learner give the same bits. Runs in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytest.importorskip("triton")
RunKernels = Callable[..., tuple[int, str]]

SCRIPT = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import palestra.engine.engine as engine_module
from palestra.algo.batch import Batch
from palestra.core.types import Sample, SamplingParams
from palestra.engine.cuda import exact as exact_kernels
from palestra.engine.cuda.runner import CudaRunner
from palestra.learner import head, kernels
from palestra.learner.forward import Scorer
from palestra.learner.tree_attention import pack_batch

options = json.loads(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter has no bfloat16
config = AutoConfig.for_model(
    options["family"], vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=options["layers"],
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0,
    **options["more"],
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which would be ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.3)
if options["lora"]:
    from palestra.core.config_sections import LoraSection
    from palestra.learner.lora import add_lora

    model = add_lora(model, LoraSection(r=3, alpha=6))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
engine_module.build_runner = CudaRunner
exact_kernels.KEYS = 16
engine = engine_module.Engine(model, page_size=16, kv_memory_gib=0.002, max_running=8, exact=True, self_check=False)
prompt = [5, 17, 9, 23, 61, 3, 42, 8, 7, 12]
temperature = 0.7
group = [*engine.fork(engine.open(prompt), 2), engine.open(prompt[:4])]
logprobs = [[0.0] * len(session.token_ids) for session in group]
for more in ([], [9, 8, 7]):  # two turns with a tool result between them
    for i, session in enumerate(group):
        engine.append(session, more)
        logprobs[i] += [0.0] * len(more)
    params = [SamplingParams(2 + i % 2, temperature=temperature, seed=i) for i in range(3)]
    for i, turn in enumerate(engine.sample(group, params)):
        logprobs[i] += turn.logprobs.tolist()
samples = [
    Sample(
        session.token_ids, policy_mask=[x != 0.0 for x in row], echo_mask=[False] * len(row), logprobs=row,
        advantages=1.0, group=i // 2, prompt_length=len(prompt) if i < 2 else 4,
    )
    for i, (session, row) in enumerate(zip(group, logprobs, strict=True))
]
head._kernels_for = lambda target, rule: (kernels.statistics, kernels.logit_gradient)
batch, scorers = Batch.of(samples), {e: Scorer(model, temperature=temperature, exact=e) for e in (False, True)}
gradients = {}
for exact, scorer in scorers.items():
    packed = pack_batch(batch, max_tokens=4096, share_prefix=True, echo=False, device=torch.device(device))
    [micro] = packed
    model.zero_grad()
    with scorer.session():
        learned, _ = scorer(micro)
        weights = torch.linspace(-1, 1, len(learned), device=device)
        (learned * weights).sum().backward()
    gradients[exact] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    apart = (learned.detach() - micro.inputs["logprobs"])[micro.policy].abs().max()
    print(exact, float(apart), len(micro.policy))
    assert apart == 0.0 if exact else apart < 0.5, float(apart)
assert gradients[True].keys() == gradients[False].keys()
for name, expected in gradients[False].items():
    off = (gradients[True][name] - expected).float().norm() / expected.float().norm()
    assert off < (0.1 if device == "cuda" else 1e-4), (name, float(off))
print("SAME")
"""

SLOW = pytest.mark.slow("make test-slow takes every model")
MODELS = {
    "qwen2 with biases": {"family": "qwen2", "more": {}, "lora": False, "layers": 1},
    "qwen2 with two layers": {"family": "qwen2", "more": {}, "lora": False, "layers": 2},
    "qwen3 with norms and LoRA": {"family": "qwen3", "more": {}, "lora": True, "layers": 1},
    "mistral with a window": {"family": "mistral", "more": {"sliding_window": 8}, "lora": False, "layers": 1},
}


@pytest.mark.parametrize("name", [next(iter(MODELS)), *(pytest.param(name, marks=SLOW) for name in list(MODELS)[1:])])
def test_the_learner_computes_the_samplers_logprobs_to_the_bit(name: str, run_kernels: RunKernels) -> None:
    status, said = run_kernels(SCRIPT, json.dumps(MODELS[name]))
    assert status == 0, said
    assert "SAME" in said
