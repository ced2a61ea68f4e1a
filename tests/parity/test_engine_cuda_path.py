"""The CUDA path against the CPU path: the same tokens. Runs in Triton's interpreter, or on a GPU.

Skipped where Triton is not installed. The interpreter is slow, so the models are small and the turns short.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
RunKernels = Callable[..., tuple[int, str]]

SCRIPT = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import palestra.engine.engine as engine_module
from palestra.core.types import SamplingParams
from palestra.engine.cuda import paged_ops
from palestra.engine.cuda.runner import CudaRunner

options = json.loads(sys.argv[1])
config = AutoConfig.for_model(
    options["family"], vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=options["layers"],
    num_attention_heads=4, max_position_embeddings=64, pad_token_id=0,
    **{"num_key_value_heads": 2, "head_dim": 16} | options["more"],
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which would be ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.3)
if options.get("lora"):
    import peft

    targets = options["lora"]
    lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval()
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

def turns(nap=False):
    engine = engine_module.Engine(
        model, page_size=16, kv_memory_gib=0.001, max_running=4, self_check=False,
        compile_grammar=lambda text: EvenBehindOdd(), record_routing=options["routes"],
    )
    assert (engine.runner.fast_decoder is not None) == options["fast"]
    if isinstance(engine.runner, CudaRunner):
        assert (engine.runner.hybrid_decoder is not None) == (options["family"] == "qwen3_5_text")
        assert len(engine.runner.recurrent_steps) == options["recurrent"]
    group = [*engine.fork(engine.open(prompt), 2), engine.open(prompt[:4])]
    out = []
    for more in ([], [4, 5, 6]):
        for session in group:
            engine.append(session, more)
        params = [
            SamplingParams(3, temperature=0.0), SamplingParams(2, seed=7), SamplingParams(3, 0.7, stop_token_ids=(1,)),
        ]
        out += engine.sample(group, params)
        if nap:
            engine.sleep()
            assert engine.runner.keys.numel() == engine.runner.values.numel() == 0
            engine.wake()
    if options["branches"]:
        branch = engine.branch(group[0], 25)
        second = engine.branch(branch, 23)  # of a branch whose partial page is still to be copied
        engine.append(second, [9])
        assert [branch.kv_len, second.kv_len] == options["branches"]
        fresh = engine.open(second.token_ids)
        *branched, again = engine.sample([branch, second, fresh], SamplingParams(2, seed=5))
        assert again.token_ids.tolist() == branched[1].token_ids.tolist()
        assert all(abs(x - y) < 1e-4 for x, y in zip(again.logprobs, branched[1].logprobs)), (again, branched)
        out += branched
        for session in (branch, second, fresh):
            engine.close(session)
    if options["grammar"]:
        held = SamplingParams(4, seed=3, grammar="even behind odd")
        out += engine.sample(group, [held, SamplingParams(4, seed=3), held])
        ids = out[-1].token_ids
        assert not any(a % 2 and b % 2 for a, b in zip(ids, ids[1:])), ids
    for session in group:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages
    if isinstance(engine.runner, CudaRunner) and not nap:
        assert options["path"] in {getattr(shape, "path", None) for shape in engine.runner._graphs}
    return out

expected = turns()
engine_module.build_runner = lambda model, shape, *more: CudaRunner(model, shape.of_one_width(), *more)
paged_ops.DECODE_PROGRAMS = options["programs"]
CudaRunner.path = options["path"]
model.to(device)
for a, b in zip(expected, turns(nap=options["nap"]), strict=True):
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish == b.finish, (a, b)
    assert not options["routes"] or (a.routing == b.routing).all(), (a.routing, b.routing)
    assert all(abs(x - y) < 1e-4 for x, y in zip(a.logprobs, b.logprobs)), (a, b)
if options["branches"]:  # a step that is collected though no turn has ended: the turn goes on with the next
    CudaRunner.poll_interval = 1
    engine = engine_module.Engine(model, page_size=16, kv_memory_gib=0.001, max_running=4, self_check=False)
    job, bursts = engine.submit(engine.open(prompt), SamplingParams(9, seed=1)), 0
    while job.finish is None:
        engine.collect(engine.launch(), until_one_ends=False)
        bursts += 1
    [whole] = engine.sample([engine.open(prompt)], SamplingParams(9, seed=1))
    assert bursts > 1
    assert job.result().token_ids.tolist() == whole.token_ids.tolist(), (job.result(), whole)
if options.get("lora"):
    engine = engine_module.Engine(model, page_size=16, kv_memory_gib=0.001, max_running=4, self_check=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)  # a training step
    engine.weights_changed(1)
    session = engine.open(prompt)
    [turn] = engine.sample([session], SamplingParams(5, seed=1))
    ids = torch.tensor([session.token_ids], device=device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    assert (own.cpu() - torch.tensor(turn.logprobs)).abs().max() < 1e-4, (own, turn.logprobs)
print("SAME")
"""


HALF = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import palestra.engine.engine as engine_module
from palestra.core.types import SamplingParams
from palestra.engine import check
from palestra.engine.cuda import paged_ops
from palestra.engine.cuda.runner import CudaRunner

sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
config = AutoConfig.for_model("qwen3", vocab_size=64, num_hidden_layers=1, head_dim=32, **sizes)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no bfloat16
model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
model.to(device)
engine_module.build_runner = CudaRunner
paged_ops.DECODE_PROGRAMS = 4
check.NEW_TOKENS = 4  # from the prompt's last page, which has room for three, into the next
engine = engine_module.Engine(model, page_size=16, kv_memory_gib=0.001, max_running=4)  # with its self-check
assert engine.runner.fast_decoder is not None
session = engine.open([5, 17, 9, 23, 61, 3, 42])
[turn] = engine.sample([session], SamplingParams(3, seed=1))
ids = torch.tensor([session.token_ids], device=device)
expected = model(input_ids=ids).logits[0, 6:-1].float().log_softmax(-1).gather(1, ids[0, 7:, None])[:, 0]
tolerated = 0.05 if device == "cuda" else 0.02
assert (expected.cpu() - torch.tensor(turn.logprobs)).abs().max() < tolerated, (expected, turn.logprobs)
print("SAME")
"""

FAULT = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import palestra.engine.engine as engine_module
from palestra.core.errors import UnsupportedModel
from palestra.engine import check
from palestra.engine.cuda import paged_ops, runner

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
config = AutoConfig.for_model("olmo2", vocab_size=64, num_hidden_layers=1, pad_token_id=0, **sizes)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
model.to("cuda" if torch.cuda.is_available() else "cpu")
engine_module.build_runner = runner.CudaRunner
paged_ops.DECODE_PROGRAMS = 1
check.NEW_TOKENS = 4
right = paged_ops.padded_tables
paged_ops.padded_tables = lambda tables: right(tables)[:, ::-1].copy()  # a prompt's pages in the wrong order
try:
    engine_module.Engine(model, page_size=16, kv_memory_gib=0.001, max_running=4)
except UnsupportedModel as error:
    assert "differ from the model's own" in str(error)
    print("SAME")
"""

UNCAPTURED = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import palestra.engine.engine as engine_module
from palestra.core.errors import ResourceError
from palestra.core.types import SamplingParams
from palestra.engine.cuda import paged_ops
from palestra.engine.cuda.runner import CudaRunner

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
config = AutoConfig.for_model("qwen3", vocab_size=24, num_hidden_layers=1, head_dim=16, **sizes, **window)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
model.to("cuda" if torch.cuda.is_available() else "cpu")

def turns():
    engine = engine_module.Engine(model, page_size=16, kv_memory_gib=0.001, max_running=2, self_check=False)
    engine.sleep()
    engine.wake()
    rows = [engine.open([14, 17, 9, 14, 17, 9]), engine.open([9, 14, 23, 14, 14, 14, 23, 14, 23, 14, 14, 14, 23])]
    out = engine.sample(rows, [SamplingParams(5, 0.05, seed=1), SamplingParams(8, 0.0, stop_token_ids=(6,))])
    return out, [row.kv_len for row in rows]

expected, lengths = turns()
engine_module.build_runner = CudaRunner
paged_ops.DECODE_PROGRAMS = 8  # two splits
CudaRunner.poll_interval = 4
sampled, same_lengths = turns()
for a, b in zip(expected, sampled, strict=True):
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish == b.finish, (a, b)
    assert all(abs(x - y) < 1e-4 for x, y in zip(a.logprobs, b.logprobs)), (a, b)
assert lengths == same_lengths

def refuse(error, context=None):
    def captured(runner, forward):
        error.__context__ = context
        raise error
    CudaRunner._captured = captured

class Captures(CudaRunner):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._captures = True

engine_module.build_runner = Captures
refuse(RuntimeError("operation not permitted when stream is capturing"))
uncaptured, _ = turns()
assert [a.token_ids.tolist() for a in uncaptured] == [a.token_ids.tolist() for a in expected]
refuse(RuntimeError("the capture ended"), torch.OutOfMemoryError("CUDA out of memory"))
try:
    turns()  # with ever smaller caches
except ResourceError:
    print("SAME")
"""

LORA_TARGETS = {
    "qwen3": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen3_5_text": ["in_proj_qkv", "in_proj_b", "out_proj", "q_proj", "o_proj", "gate_proj"],
}
DELTA_NET = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 32,
    "num_local_experts": 0,
}
LATENT = {  # keys of 24 numbers, values of 16
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
}
SLOW = pytest.mark.slow("make test-slow runs every family")


@pytest.mark.parametrize(
    ("family", "more", "fast", "programs"),
    [
        ("gemma2", {"sliding_window": 7}, False, 16),
        # one program a row; with 16 its pages are split among two
        pytest.param("qwen3", {}, True, 1, marks=SLOW),
        pytest.param(
            "smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2}, True, 1, marks=SLOW
        ),
        pytest.param("mistral", {"sliding_window": 6}, True, 16, marks=SLOW),
        pytest.param(
            "qwen3_5_text",
            {"layer_types": ["linear_attention", "full_attention"], **DELTA_NET},
            False,
            16,
            marks=SLOW,  # tests/parity/test_recurrent_steps.py has its steps, and a decoder of both kinds of layers
        ),
        ("gpt_oss", {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}, False, 16),
        pytest.param("deepseek_v3", LATENT, False, 1, marks=SLOW),
        pytest.param("lfm2", {"layer_types": ["conv", "full_attention"]}, False, 1, marks=SLOW),
        pytest.param("granitemoehybrid", {"layer_types": ["mamba", "attention"], **MAMBA}, False, 1, marks=SLOW),
    ],
)
def test_cuda_path_samples_what_the_cpu_path_samples(
    run_kernels: RunKernels, family: str, more: dict[str, Any], fast: bool, programs: int
) -> None:
    options = {
        "family": family,
        "more": more,
        "fast": fast,
        "programs": programs,
        "grammar": family in ("gemma2", "gpt_oss"),
        "routes": family == "gpt_oss",
        "nap": family == "mistral",
        "layers": 1 if family == "mistral" else 2,  # mistral's layers are all alike
        "path": "shared_prefix" if family == "gemma2" else "per_row",
        # what two branches share; a recurrent state is held where a turn began alone
        "branches": {"qwen3": [24, 22], "qwen3_5_text": [24, 0], "lfm2": [24, 0]}.get(family),
        "lora": LORA_TARGETS.get(family, []),
        "recurrent": int(family in ("qwen3_5_text", "lfm2", "granitemoehybrid")),
    }
    status, output = run_kernels(SCRIPT, json.dumps(options))
    assert status == 0, output[-3000:]
    assert output.endswith("SAME\n")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(UNCAPTURED, id="steps that cannot be captured sample the same"),
        pytest.param(FAULT, id="a wrong page is noticed at load"),
        pytest.param(HALF, id="half precision is rounded as the module rounds", marks=pytest.mark.slow),
    ],
)
def test_kernels(run_kernels: RunKernels, script: str) -> None:
    status, output = run_kernels(script)
    assert status == 0, output[-3000:]
    assert output.endswith("SAME\n")
