"""The engine on a GPU against transformers' own sampling, at the shape of Qwen3-0.6B or Qwen3.5-0.8B.

    PYTHONPATH=src python3 benchmarks/gpu_decode.py [kernels parity decode prefixes lora generate agent]
    PYTHONPATH=src python3 benchmarks/gpu_decode.py --shape qwen3.5-0.8B parity decode fills generate agent ragged
    PYTHONPATH=src python3 benchmarks/gpu_decode.py --shape qwen3.5-0.8B delta_rule mamba_scan  # on a CPU too, smaller
    export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton
    PYTHONPATH=src python3 benchmarks/gpu_decode.py --shape qwen3.5-0.8B compile_generate  # fills these caches
    PYTHONPATH=src python3 benchmarks/gpu_decode.py --shape qwen3.5-0.8B agent_compiled    # uses them

Random weights: speed depends on shapes alone. Each line is one JSON object; the last table sums up. `profile` has the
kernels of a decode step. `--module` computes decode steps by the model's own layers; `--tiny` runs the script with a
tiny model on whatever is there.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from types import SimpleNamespace
from typing import Any

import gpu_agent
import torch
from gpu_agent import seconds, synchronize
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from palestra.core.types import SamplingParams
from palestra.engine.cuda import runner as cuda_runner
from palestra.engine.engine import Engine
from palestra.engine.recurrent import state_bytes
from palestra.engine.supported import kv_shape

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 20480, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN35_08B: dict[str, Any] = {  # the text model: every fourth layer attends, the others are gated delta nets
    "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True,
    "max_position_embeddings": 20480, "rms_norm_eps": 1e-6, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
SHAPES = {"qwen3-0.6B": ("qwen3", QWEN3_06B), "qwen3.5-0.8B": ("qwen3_5_text", QWEN35_08B)}
TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
TINY_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
DECODE_TARGETS = {"qwen3-0.6B": {64: 33000, 256: 60000, 512: 68000}, "qwen3.5-0.8B": {64: 24600, 256: 41100}}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
COPY_BYTES_PER_S = 4.23e12  # an H200's measured copy rate: the floor of a decode step is bytes over this
CONTEXT = 384
OPTIONS = argparse.Namespace(shape="qwen3-0.6B", module=False, tiny=False)
RESULTS: list[dict[str, Any]] = []


def report(**row: Any) -> None:
    row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    RESULTS.append(row)
    print(json.dumps(row), flush=True)


def sizes() -> dict[str, Any]:
    family, shape = SHAPES[OPTIONS.shape]
    tiny = TINY | (TINY_DELTA_NET if family == "qwen3_5_text" else {})
    return shape | tiny if OPTIONS.tiny else shape


def build() -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        config = AutoConfig.for_model(SHAPES[OPTIONS.shape][0], **sizes())
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def engine_of(model: Any, kv_memory_gib: float, **options: Any) -> Engine:
    engine = Engine(model, kv_memory_gib=0.1 if OPTIONS.tiny else kv_memory_gib, **options)
    if OPTIONS.module:
        engine.runner.disable_fast_path()
    return engine


def prompts(n: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, sizes()["vocab_size"], (n, length), generator=generator).tolist()


def reference(q: Any, keys: Any, values: Any, table: Any, length: int, window: int, softcap: float) -> Any:
    """Attention of the last len(q) positions of one row, in float32. q [Q, H, D] -> [Q, H, D]."""
    k, v = (x[table].transpose(0, 1).flatten(1, 2)[:, :length].float() for x in (keys, values))
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    place = torch.arange(length - q.shape[0], length, device=q.device)[:, None]
    seen = torch.arange(length, device=q.device) <= place
    if window:
        seen &= torch.arange(length, device=q.device) > place - window
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def shared_rows(tables: Any, lens: Any, page: int, generator: Any) -> Any:
    """Tables where rows by threes begin with the same pages, and these prefixes."""
    from palestra.engine.session import BLOCK_ROWS, SharedPrefixes

    tables, rows = tables.clone(), len(lens)
    blocks = torch.randperm(rows, generator=generator)[: rows - rows % 3].view(-1, 3)
    tokens = torch.zeros(rows, dtype=torch.int32)
    for block in blocks:
        pages = (int(lens[block].min()) - 1) // page
        tables[block, :pages] = tables[block[0], :pages]
        tokens[block] = pages * page
    blocks = torch.nn.functional.pad(blocks[tokens[blocks[:, 0]] > 0], (0, BLOCK_ROWS - 3), value=-1)
    blocks = torch.cat([blocks, torch.full((1, BLOCK_ROWS), -1)])  # one of nobody
    return tables, SharedPrefixes(tokens.cuda(), blocks.int().cuda())


@torch.inference_mode()
def kernels() -> None:
    """Triton against the reference on random ragged shapes, bf16."""
    from palestra.engine.attention import ScoreRule
    from palestra.engine.cuda.paged_ops import DecodePlan, PrefillPlan

    generator = torch.Generator().manual_seed(int(time.time()))
    worst = {"decode": 0.0, "shared": 0.0, "prefill": 0.0}
    for trial in range(24):
        rows = int(torch.randint(1, 40, (1,), generator=generator))
        kv, group, dim = [(8, 2, 128), (2, 4, 64), (4, 1, 80), (1, 8, 256), (3, 3, 64)][trial % 5]
        page, window, softcap = 64, [0, 0, 100][trial % 3], [0.0, 30.0][trial % 2]
        rule = ScoreRule(dim**-0.5, window or None, softcap or None)
        lens = torch.randint(1, 1500, (rows,), generator=generator)
        counts = [int(torch.randint(1, int(n) + 1, (1,), generator=generator)) for n in lens]
        width = -(-int(lens.max()) // page)
        tables = torch.randperm(rows * width, generator=generator).view(rows, width).cuda()
        stores = [torch.randn(rows * width, kv, page, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        module, layers = SimpleNamespace(layer_idx=0), [store[None] for store in stores]  # a model of one layer

        def fresh(n: int, heads: int, dim: int = dim) -> torch.Tensor:
            return torch.randn(1, heads, n, dim, device="cuda", dtype=torch.bfloat16)

        def ragged(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        q, k, v = fresh(rows, kv * group), fresh(rows, kv), fresh(rows, kv)
        plan = DecodePlan(*layers, tables.int(), lens.int().cuda())
        out = plan.attend(module, q, k, v, rule)[0]  # type: ignore[arg-type]
        for r in range(rows):
            want = reference(q[0, :, r][None], *stores, tables[r], int(lens[r]), window, softcap)
            worst["decode"] = max(worst["decode"], (out[r].float() - want[0]).abs().max().item())
        shared_tables, plan.shared = shared_rows(tables, lens, page, generator)
        plan.tables = shared_tables.int()
        out = plan.attend(module, q, k, v, rule)[0]  # type: ignore[arg-type]
        for r in range(rows):
            want = reference(q[0, :, r][None], *stores, shared_tables[r], int(lens[r]), window, softcap)
            worst["shared"] = max(worst["shared"], (out[r].float() - want[0]).abs().max().item())
        total = sum(counts)
        q, k, v = fresh(total, kv * group), fresh(total, kv), fresh(total, kv)
        positions = [p for n, c in zip(lens.tolist(), counts, strict=True) for p in range(n - c, n)]
        pages = [
            int(tables[r, p // page])
            for r, (n, c) in enumerate(zip(lens.tolist(), counts, strict=True))
            for p in range(n - c, n)
        ]
        blocks = [(r, s) for r, c in enumerate(counts) for s in range(0, c, 64)]
        firsts = [sum(counts[:r]) for r in range(rows)]
        prefill = PrefillPlan(
            *layers, tables.int(), ragged([0] * total), ragged(positions), ragged(pages),
            ragged([r for r, _ in blocks]), ragged([s for _, s in blocks]),
            ragged(firsts), ragged(counts), ragged(lens.tolist()), 64,
        )  # fmt: skip
        out = prefill.attend(module, q, k, v, rule)[0]  # type: ignore[arg-type]
        for r in range(rows):
            mine = slice(firsts[r], firsts[r] + counts[r])
            want = reference(q[0, :, mine].transpose(0, 1), *stores, tables[r], int(lens[r]), window, softcap)
            worst["prefill"] = max(worst["prefill"], (out[mine].float() - want).abs().max().item())
    report(what="kernel vs reference, max difference", **worst, target=2e-2)


@torch.inference_mode()
def parity(model: Any) -> None:
    """Engine logprobs against the model's own forward, bf16."""
    engine = engine_of(model, 4)
    group = [s for p in prompts(4, 300) for s in engine.fork(engine.open(p), 4)]
    turns = engine.sample(group, [SamplingParams(64, seed=i) for i in range(16)])
    differences = []
    for session, turn in zip(group, turns, strict=True):
        ids = torch.tensor([session.token_ids], device=DEVICE)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, 299:-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 300:, None])[:, 0].cpu()
        differences.append((expected - torch.tensor(turn.logprobs)).abs())
    difference = torch.cat(differences)
    report(
        what="bf16 logprob, engine vs model", mean=difference.mean().item(), max=difference.max().item(), target=0.02
    )


def decode(model: Any) -> None:
    """Tokens/s of the decode phase at a mean context of 384, host work included, once all prompts are computed."""
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    new, repeats, targets = (4, 1, {2: 0}) if OPTIONS.tiny else (64, 3, DECODE_TARGETS[OPTIONS.shape])
    engine = engine_of(model, 40, max_running=max(targets), tokens_per_step=32768)
    shape = kv_shape(model)
    for batch, target in targets.items():
        rates = []
        for _ in range(repeats):
            sessions = [engine.open(p) for p in prompts(batch, CONTEXT - new // 2)]
            engine.sample(sessions, SamplingParams(1))
            jobs = [engine.submit(s, SamplingParams(new, seed=i)) for i, s in enumerate(sessions)]

            def rest(jobs: list[Any] = jobs) -> None:
                while any(job.finish is None for job in jobs):
                    engine.step()

            elapsed = seconds(rest)
            rates.append(batch * new / elapsed)
            for session in sessions:
                engine.close(session)
        row_bytes = CONTEXT * shape.bytes_per_token + 2 * state_bytes(shape.states)  # states are read and written
        floor = batch / ((weight_bytes + batch * row_bytes) / COPY_BYTES_PER_S)
        report(
            what="engine decode", batch=batch, ms_per_step=1000 * batch / max(rates), tokens_per_s=round(max(rates)),
            runs=[round(r) for r in rates], share_of_floor=max(rates) / floor,
            target=target,
        )  # fmt: skip


def fills(model: Any) -> None:
    """Prompts of models with recurrent layers: by our kernels, one token after the other, and by the layers' own
    forward, in chunks. The median of five."""
    before, by = cuda_runner.MAX_RUN, {"ours": 1 << 30, "modules": 0}
    for rows, length in ((2, 20),) if OPTIONS.tiny else ((64, 64), (8, 350), (8, 1000), (8, 2000), (2, 8000)):
        times: dict[str, float] = {}
        for name, limit in by.items():
            cuda_runner.MAX_RUN = limit
            engine = engine_of(model, 20, max_running=64, tokens_per_step=32768)
            samples = []
            for repeat in range(6):
                texts = [[repeat, *prompt] for prompt in prompts(rows, length)]  # else they share what they computed
                sessions = [engine.open(text) for text in texts]
                samples.append(seconds(lambda engine=engine, s=sessions: engine.sample(s, SamplingParams(1))))
                for session in sessions:
                    engine.close(session)
            times[name + "_ms"] = 1000 * sorted(samples[1:])[2]
            del engine
        report(what="prompts and one token", rows=rows, tokens=length, **times)
    cuda_runner.MAX_RUN = before


def profile(model: Any, rows: tuple[int, ...] = (64, 256), new: int = 32) -> None:
    """The kernels of a decode step: how many, and which take longest."""
    engine = engine_of(model, 40, max_running=max(rows), tokens_per_step=32768)
    on_gpu = torch.autograd.DeviceType.CUDA if DEVICE == "cuda" else torch.autograd.DeviceType.CPU
    for batch in (2,) if OPTIONS.tiny else rows:
        sessions = [engine.open(p) for p in prompts(batch, CONTEXT - new // 2)]
        engine.sample(sessions, SamplingParams(2))  # captures its graph
        with torch.profiler.profile() as profiled:
            engine.sample(sessions, SamplingParams(new))
            synchronize()
        events = [event for event in profiled.key_averages() if event.device_type == on_gpu]
        busy_ms = sum(event.self_device_time_total for event in events) / 1000 / new
        report(what="a decode step's kernels", batch=batch, count=sum(e.count for e in events) / new, busy_ms=busy_ms)
        for event in sorted(events, key=lambda e: -e.self_device_time_total)[:16]:
            time_us = event.self_device_time_total / new
            print(f"#   {time_us:8.1f} us a step, {event.count / new:6.1f} x {event.key[:100]}", flush=True)
        for session in sessions:
            engine.close(session)


def prefixes(model: Any) -> None:
    """Decode steps of groups of 8 whose prompts are read once for all siblings, and by each; the engine's choice."""
    engine, new = engine_of(model, 40, max_running=256, tokens_per_step=32768), 64
    for rows, length in [(8, 1024), (8, 15360), (64, 256), (64, 1024), (64, 4096), (256, 256), (256, 1024)]:
        row: dict[str, Any] = {}
        for engine.runner.path in ("per_row", "shared_prefix", None):
            group = [s for p in prompts(rows // 8, length) for s in engine.fork(engine.open(p), 8)]
            engine.sample(group, SamplingParams(2))  # captures its graph
            elapsed = seconds(lambda group=group: engine.sample(group, SamplingParams(new)))  # type: ignore[misc]
            row[engine.runner.path or "chosen"] = round(rows * new / elapsed)
            for session in group:
                engine.close(session)
        report(what="decode of siblings, tokens/s", rows=rows, prompt=length, **row)


def lora(model: Any) -> None:
    """The same with adapters of rank 8 on all linear layers (random ones, as if they had been trained)."""
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    try:
        parity(adapted)
        decode(adapted)
    finally:
        adapted.unload()


def generate(model: Any) -> None:
    """transformers' own: generate, compiled with a static cache, continuous batching; batch 64, context 384."""
    batch, new = (2, 4) if OPTIONS.tiny else (64, 64)
    ids = torch.tensor(prompts(batch, CONTEXT - new // 2), device=DEVICE)
    common = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    mask = torch.ones_like(ids)

    def timed(what: str, **options: Any) -> None:
        try:
            model.generate(input_ids=ids, attention_mask=mask, **common, **options)
            elapsed = seconds(lambda: model.generate(input_ids=ids, attention_mask=mask, **common, **options))
            report(
                what=what, batch=batch, ms_per_step=1000 * elapsed / new, tokens_per_s=round(batch * new / elapsed)
            )  # fmt: skip
        except Exception as error:
            report(what=what, error=str(error)[:200])

    timed("generate")
    timed("compiled static generate", cache_implementation="static")
    try:
        config = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
        rows = ids.tolist()
        model.generate_batch(inputs=rows[:8], generation_config=config, progress_bar=False)
        elapsed = seconds(lambda: model.generate_batch(inputs=rows, generation_config=config, progress_bar=False))
        report(what="continuous batching", batch=batch, tokens_per_s=round(batch * new / elapsed))
    except Exception as error:
        report(what="continuous batching", error=str(error)[:200])
    finally:
        model.set_attn_implementation("sdpa")  # continuous batching leaves its own behind when it fails


def delta_rule(model: Any) -> None:
    """The gated delta rule of one layer against transformers' code for it: prompts, and siblings that continue them."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from palestra.engine.recurrences import chunk_gated_delta_rule

    heads, key, value = (sizes()[f"linear_{n}"] for n in ("num_value_heads", "key_head_dim", "value_head_dim"))

    def inputs(rows: int, length: int) -> dict[str, torch.Tensor]:
        q, k, v = (random_of(rows, length, heads, n, dtype=DTYPE) for n in (key, key, value))
        g, beta = -random_of(rows, length, heads).abs(), random_of(rows, length, heads).sigmoid()
        return {
            "query": q,
            "key": k,
            "value": v,
            "g": g,
            "beta": beta,
            "initial_state": random_of(rows, heads, key, value),
        }

    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    of_a_layer("gated delta rule", inputs, options, chunk_gated_delta_rule, torch_chunk_gated_delta_rule)


def mamba_scan(model: Any) -> None:
    """The same of the scan of a Mamba 2 layer of Nemotron 3 Nano's size. On a CPU transformers' takes six seconds."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    from palestra.engine.recurrences import mamba_chunk_scan

    heads, size, groups, state = (4, 8, 2, 16) if OPTIONS.tiny else (64, 64, 8, 128)

    def inputs(rows: int, length: int) -> dict[str, torch.Tensor]:
        b, c = (random_of(rows, length, groups, state, dtype=DTYPE) for _ in range(2))
        return {
            "hidden_states": random_of(rows, length, heads, size, dtype=DTYPE), "B": b, "C": c,
            "dt": random_of(rows, length, heads, dtype=DTYPE), "A": -random_of(heads).exp(), "D": random_of(heads),
            "dt_bias": random_of(heads), "initial_states": random_of(rows, heads, size, state),
        }  # fmt: skip

    options = {"chunk_size": 128, "dt_softplus": True, "return_final_states": True}
    of_a_layer("scan of Mamba 2", inputs, options, mamba_chunk_scan, mamba2_chunk_scan)


def of_a_layer(what: str, inputs: Any, options: dict[str, Any], ours: Any, theirs: Any) -> None:
    """One function of a layer, forward and backward, by our code and by transformers', which may lack the memory."""
    on_gpu = DEVICE == "cuda"
    for rows, length in [(2, 70)] if OPTIONS.tiny else [(8 if on_gpu else 1, 350), (64 if on_gpu else 4, 384)]:
        row: dict[str, Any] = {}
        for who, rule in (("ours", ours), ("theirs", theirs)):
            try:
                runs = [rule_ms(rule, inputs(rows, length), options) for _ in range(4)][1:]
                row[who] = [min(times) for times in zip(*runs, strict=True)]
            except torch.OutOfMemoryError:
                row[who] = "out of memory"
        if "out of memory" not in row.values():
            row["ratio"] = sum(row["theirs"]) / sum(row["ours"])
        report(what=f"{what} of a layer, ms forward and backward", rows=rows, tokens=length, **row)


def rule_ms(rule: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[float, float]:
    given = {name: x.requires_grad_() for name, x in inputs.items()}
    found: list[Any] = []
    forward = seconds(lambda: found.extend(rule(**given, **options)))
    grads = [torch.ones_like(x) for x in found]
    return 1000 * forward, 1000 * seconds(lambda: torch.autograd.grad(found, list(given.values()), grads))


def random_of(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, device=DEVICE, dtype=dtype)


def agent(model: Any) -> None:
    """A whole step of rollouts with tool calls (gpu_agent.py) against `generate` and the plain update of learner.py."""
    for row in gpu_agent.agent(model, engine_of(model, 20, max_running=64, tokens_per_step=32768), agent_rollouts()):
        report(**row)


def ragged(model: Any) -> None:
    """Our step again, where prompts and tool results have many lengths."""
    plan = gpu_agent.rollouts(sizes()["vocab_size"], OPTIONS.tiny, ragged=True)
    report(**gpu_agent.ragged(model, engine_of(model, 20, max_running=64, tokens_per_step=32768), plan))


def compile_generate(model: Any) -> None:
    """Fill the compile caches for `agent_compiled`; other programs may use the GPU at the same time."""
    report(**gpu_agent.compile_only(model, agent_rollouts()))


def agent_compiled(model: Any) -> None:
    """The same step against compiled `generate`; neither compilation nor warm-up is counted."""
    engine = engine_of(model, 20, max_running=64, tokens_per_step=32768)
    for row in gpu_agent.agent_compiled(model, engine, agent_rollouts()):
        report(**row)


def agent_rollouts() -> gpu_agent.Rollouts:
    return gpu_agent.rollouts(sizes()["vocab_size"], OPTIONS.tiny)


def main() -> None:
    all_parts = ["kernels", "parity", "decode", "profile", "prefixes", "lora", "generate", "agent"]
    more = ["fills", "delta_rule", "mamba_scan", "ragged", "compile_generate", "agent_compiled"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"default: {' '.join(all_parts)}; also {' '.join(more)}"
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6B")
    parser.add_argument("--module", action="store_true", help="decode by the model's own layers, without ours")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, few rows")
    parser.parse_args(namespace=OPTIONS)
    parts = OPTIONS.parts or all_parts
    if unknown := set(parts) - {*all_parts, *more}:
        parser.error(f"no parts: {' '.join(sorted(unknown))}")
    model = build() if set(parts) - {"kernels", "delta_rule", "mamba_scan"} else None
    for part in parts:
        start = time.perf_counter()
        try:
            kernels() if part == "kernels" else globals()[part](model)
        except Exception as error:  # a part that fails must not cost the figures of the others
            traceback.print_exc()
            report(what=part, error=str(error)[:300])
        print(f"# {part}: {time.perf_counter() - start:.1f} s", flush=True)
    print("\n".join(json.dumps(row) for row in RESULTS))


if __name__ == "__main__":
    main()
