"""The learner's step against the plain computation: padded rows, whole logits, the same loss and optimizer.

python benchmarks/learner.py            on this CPU: CPU seconds of one step
python benchmarks/learner.py --gpu      on a CUDA GPU: milliseconds, TFLOP/s by 6·N·tokens, peak memory
python benchmarks/learner.py --gpu --only learner --profile    of each learner's step: how long the GPU is busy, by
                                        kernel, when it is idle and what the host does then, and memory (3 minutes)
python benchmarks/learner.py --gpu --only "of 135M"    the small model's rows alone, in micro-batches of 16,384 tokens
                                        and of the size that suits it; then prompts that begin alike, with this
                                        beginning computed once or with every prompt (2 minutes)
python benchmarks/learner.py --gpu --tiny    the same script with a tiny shape, on whatever is there
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch._inductor.config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective, token_weights
from palestra.algo.losses import policy_loss as token_policy_loss
from palestra.core.config import RunConfig
from palestra.core.types import Sample
from palestra.learner import compiled_layers
from palestra.learner.local import LocalLearner
from palestra.train.update import coefficients_at, update


def policy_loss(objective, logprobs, old, row, advantages, **more):
    """With one advantage a row."""
    return token_policy_loss(objective, logprobs, old, row, advantages[row], rows=len(advantages), **more)


SETTINGS: dict[str, object] = {}
ONLY, PROFILE = "", False  # ways of rows whose name has this; whether their steps are profiled
IDLE_MS = 0.2  # shorter gaps between kernels are only added up
SHAPES = {  # hidden, layers, heads, key-value heads, head size, feed-forward, vocabulary
    "tiny": (128, 4, 4, 2, 32, 384, 4096),
    "small": (384, 6, 6, 2, 64, 1024, 16384),
    "135M": (576, 30, 9, 3, 64, 1536, 49152),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936),
    "tiny-moe": (64, 2, 4, 2, 16, 96, 512),
    "30B-A3B": (2048, 48, 32, 4, 128, 6144, 151936),
}
MIXTURES = {"tiny-moe": (8, 2, 32), "30B-A3B": (128, 8, 768)}  # experts, those of a token, their feed-forward


def build(shape: str, dtype: torch.dtype, device: str) -> nn.Module:
    hidden, layers, heads, kv_heads, head_dim, feed_forward, vocabulary = SHAPES[shape]
    experts, per_token, expert_size = MIXTURES.get(shape, (0, 0, 0))
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": True,
    }
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        vocab_size=vocabulary,
        tie_word_embeddings=not experts,
        max_position_embeddings=40960,
        **(mixture if experts else {}),
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def make_samples(
    groups: int, siblings: int, prompt: int, completion: int, vocabulary: int, beginning: int = 0
) -> list[Sample]:
    """All prompts begin with the same `beginning` tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    samples, common = [], tokens(beginning)
    for group in range(groups):
        shared = common + tokens(prompt - beginning)
        for sibling in range(siblings):
            size = prompt + completion
            trained = (False,) * prompt + (True,) * completion
            logprobs = (0.0,) * prompt + (-8.0,) * completion
            advantage = (sibling - (siblings - 1) / 2) / siblings or 0.5
            ids = tuple(shared + tokens(completion))
            samples.append(Sample(ids, trained, (False,) * size, logprobs, advantage, group, prompt))
    return samples


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[Sample], rows_at_once: int = 1024
) -> Tensor:
    """One GRPO step as it is usually written: every row whole, [B, T, V] logits, masks."""
    device = next(model.parameters()).device
    tokens_total = float(sum(int(s.policy_mask.sum()) for s in samples))
    for first in range(0, len(samples), rows_at_once):
        part = samples[first : first + rows_at_once]
        ids = torch.tensor(np.stack([s.token_ids for s in part]), device=device).long()
        mask = torch.tensor(np.stack([s.policy_mask for s in part]), device=device)[:, 1:]
        advantages = torch.tensor([float(s.advantages[0]) for s in part], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        row = mask.nonzero()[:, 0]
        token_loss, _ = policy_loss(Objective(), logprobs[mask], None, row, advantages)
        weights = token_weights(
            "dapo", row, mask.sum(1), rows_total=len(samples), tokens_total=tokens_total, max_completion_length=1024
        )
        (token_loss * weights).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def learner_for(
    model: nn.Module, tokens_per_micro_batch: int | None, share_prefix: bool = True
) -> tuple[LocalLearner, RunConfig]:
    config = RunConfig.build(
        {
            "train": {"tokens_per_micro_batch": tokens_per_micro_batch, "share_prefix": share_prefix},
            "rollout": {"temperature": 1.0},
        },
        SETTINGS,
    )
    return LocalLearner(model, config=config), config


def step_of(learner: LocalLearner, samples: Sequence[Sample], config: RunConfig) -> dict[str, float]:
    """A training step's update, as the loop does it."""
    return update(learner, Batch.of(samples), config, coefficients_at(0, config, None, 0.0), version=0)


def on_cpu(repeats: int) -> None:
    torch.set_num_threads(1)
    print("| model | rows | plain CPU-s | learner CPU-s | times less |\n| --- | --- | --- | --- | --- |")
    for shape in ("tiny", "small"):
        samples = make_samples(1, 8, 300, 60, SHAPES[shape][-1])
        model, twin = build(shape, torch.float32, "cpu"), build(shape, torch.float32, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        learner, config = learner_for(twin, 16384)

        def timed(work: Callable[[], object]) -> float:
            started = time.process_time()
            work()
            return time.process_time() - started

        def plain(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> object:
            return plain_step(model, optimizer, samples)  # noqa: B023

        def ours(learner: LocalLearner = learner, config: RunConfig = config) -> object:
            return step_of(learner, samples, config)  # noqa: B023

        norms = float(plain()), ours()["grad_norm"]  # type: ignore[index, arg-type]
        assert abs(norms[0] / norms[1] - 1) < 1e-3, f"not the same gradient: {norms}"
        times = [(timed(plain), timed(ours)) for _ in range(repeats)]
        a, b = (statistics.median(column) for column in zip(*times, strict=True))
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"| {shape}, {millions:.1f} M | 8 x (300 + 60) | {a:.3f} | {b:.3f} | {a / b:.2f} |", flush=True)


def on_gpu(tiny: bool, repeats: int) -> None:
    """Whole steps, optimizer included; every variant starts from the same weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, dtype = ("tiny", torch.float32) if tiny else ("0.6B", torch.bfloat16)
    rows, length, groups, siblings, prompt, completion = (4, 32, 2, 3, 24, 8) if tiny else (32, 512, 8, 8, 512, 128)
    vocabulary = SHAPES[shape][-1]
    lone = make_samples(rows, 1, 1, length - 1, vocabulary)
    shared = make_samples(groups, siblings, prompt, completion, vocabulary)
    name = f"{rows} x {length}"
    group_name = f"{groups} x {siblings} x ({prompt} + {completion})"
    print("| rows | way | micro-batch tokens | ms | TFLOP/s | peak GiB | gradient norm | warm-up s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    measure_gpu(
        name, "plain, whole logits", rows * length, plain_for(shape, dtype, device, lone, rows * length), repeats
    )
    for micro in (rows * length, rows * length // 2):
        measure_gpu(name, "learner", micro, learner_step_for(shape, dtype, device, lone, micro), repeats)
    quarter = groups * siblings * (prompt + completion) // 4
    measure_gpu(group_name, "plain, whole logits", quarter, plain_for(shape, dtype, device, shared, quarter), repeats)
    for share in (False, True):
        way = "learner, prompt shared" if share else "learner, prompt repeated"
        measure_gpu(group_name, way, quarter, learner_step_for(shape, dtype, device, shared, quarter, share), repeats)
    small, agents = ("tiny", (2, 3, 24, 8)) if tiny else ("135M", (64, 8, 220, 45))
    rows_name = "{}: {} x {} x ({} + {})".format(small, *agents)
    for micro in (16384, None):
        samples = make_samples(*agents, SHAPES[small][-1])
        measure_gpu(rows_name, "learner", micro, learner_step_for(small, dtype, device, samples, micro), repeats)
    groups, siblings, prompt, completion, beginning = (4, 3, 96, 8, 80) if tiny else (64, 8, 400, 45, 384)
    rows_name = f"{small}: {groups} x {siblings} x ({prompt} + {completion}), {beginning} common"
    samples = make_samples(groups, siblings, prompt, completion, SHAPES[small][-1], beginning)
    for micro in (16384, None):
        for root in (False, True):
            way = "learner" if root else "learner, beginning repeated"
            start = learner_step_for(small, dtype, device, samples, micro, root=root)
            measure_gpu(rows_name, way, micro, start, repeats)


def keep_all_but(columns: int) -> None:
    """Layers do not keep products that have so many columns: less memory for more time."""
    keep = compiled_layers._what_to_keep

    def what_to_keep(context: object, operation: object, *args: Tensor, **kwargs: object) -> object:
        is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if is_product and args[-1].shape[1] == columns:
            return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        return keep(context, operation, *args, **kwargs)

    compiled_layers._what_to_keep = what_to_keep
    torch._inductor.config.force_disable_caches = True  # the policy is no part of their keys


Step = Callable[[], float]


def plain_for(
    shape: str, dtype: torch.dtype, device: str, samples: list[Sample], micro: int
) -> Callable[[], tuple[Step, nn.Module, list[Sample]]]:
    def start() -> tuple[Step, nn.Module, list[Sample]]:
        model = build(shape, dtype, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        rows = max(1, micro // len(samples[0].token_ids))
        return lambda: float(plain_step(model, optimizer, samples, rows)), model, samples

    return start


def learner_step_for(
    shape: str,
    dtype: torch.dtype,
    device: str,
    samples: list[Sample],
    micro: int | None,
    share: bool = True,
    root: bool = True,
) -> Callable[[], tuple[Step, nn.Module, list[Sample]]]:
    def start() -> tuple[Step, nn.Module, list[Sample]]:
        model = build(shape, dtype, device)
        learner, config = learner_for(model, micro, share)
        if not root:
            learner._min_root = 0
        return lambda: step_of(learner, samples, config)["grad_norm"], model, samples

    return start


def measure_gpu(
    rows: str, way: str, micro: int | None, start: Callable[[], tuple[Step, nn.Module, list[Sample]]], repeats: int
) -> None:
    """One line of the table: median wall time of a step, after two warm-up steps."""
    if ONLY not in f"{way} of {rows}":
        return
    cuda = torch.cuda.is_available()
    step, model, samples = start()
    started = time.perf_counter()
    norm = step()
    step()
    warm = time.perf_counter() - started
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    parameters = sum(p.numel() for p in model.parameters())
    flops = 6 * parameters * sum(len(s.token_ids) for s in samples) / seconds / 1e12
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    figures = f"{seconds * 1e3:.0f} | {flops:.0f} | {peak:.1f} | {norm:.4f} | {warm:.0f}"
    print(f"| {rows} | {way} | {micro or 'suited'} | {figures} |", flush=True)
    if PROFILE:
        profile_step(step)
    del step, model
    if cuda:
        torch.cuda.empty_cache()


def profile_step(step: Step) -> None:
    """Where the time of one step goes."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        print(f"GiB between steps: {torch.cuda.memory_allocated() / 2**30:.1f}")
    with torch.profiler.profile() as profile, Stacks() as stacks:
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    events = profile.key_averages()
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    print(
        f"profiled step {seconds * 1e3:.0f} ms, kernels {busy * 1e3:.0f} ms in {sum(e.count for e in kernels)} launches"
    )
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:30]:
        print(f"  GPU  {event.self_device_time_total / 1e3:8.2f} ms {event.count:6d} x {event.key[:110]}")
    for event in sorted(events, key=lambda e: -e.self_cpu_time_total)[:20]:
        print(f"  host {event.self_cpu_time_total / 1e3:8.2f} ms {event.count:6d} x {event.key[:110]}")
    first_ns = profile.profiler.kineto_results.trace_start_ns()  # type: ignore[union-attr]
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    ranges = [
        (first_ns + int(e.time_range.start * 1e3), first_ns + int(e.time_range.end * 1e3))
        for e in profile.events() or []
        if e.device_type == device and (cuda or e.name == "aten::mm")
    ]
    print_gaps(ranges, stacks.found)


class Stacks:
    """Where the host is, some thousand times a second: (time in ns, innermost frames). Autograd has its own thread."""

    def __enter__(self) -> Stacks:
        self.found: list[tuple[int, str]] = []
        self._main, self._done = threading.get_ident(), threading.Event()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _sample(self) -> None:
        while not self._done.wait(2e-4):
            threads = sys._current_frames()
            main = threads.pop(self._main)
            threads.pop(threading.get_ident())
            waits = main.f_code.co_name == "_engine_run_backward"
            busy = [f for f in threads.values() if waits and Path(f.f_code.co_filename).name != "threading.py"]
            frames = list(traceback.walk_stack(busy[0] if busy else main))[:40]
            own = [found for found in frames if "palestra" in found[0].f_code.co_filename][:2]
            names = [f"{Path(f.f_code.co_filename).name}:{line} {f.f_code.co_name}" for f, line in (frames[0], *own)]
            self.found.append((time.time_ns(), " < ".join(dict.fromkeys(names))))


def print_gaps(ranges: list[tuple[int, int]], stacks: list[tuple[int, str]]) -> None:
    """When no kernel ran: how long in all, and for each long gap what the host did."""
    ends, gaps = 0, []
    for start, end in sorted(ranges):
        if ends and start > ends:
            gaps.append((ends, start))
        ends = max(ends, end)
    short = sum(b - a for a, b in gaps if b - a < IDLE_MS * 1e6) / 1e6
    began = min(ranges, default=(0, 0))[0]
    print(f"idle between kernels: {sum(b - a for a, b in gaps) / 1e6:.1f} ms, of which {short:.1f} in short gaps")
    before = [where for at, where in stacks if at < began]
    print(f"  before the first kernel, samples of 0.2 ms: {Counter(before).most_common(8)}")
    for a, b in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:25]:
        if b - a >= IDLE_MS * 1e6:
            seen = Counter(where for at, where in stacks if a <= at <= b).most_common(2)
            print(f"  idle {(b - a) / 1e6:6.2f} ms at {(a - began) / 1e6:7.1f} ms: {seen}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bf16-states", action="store_true", help="without float32 master weights, as the plain one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="the ways whose name has this, such as learner")
    parser.add_argument("--recompute", type=int, help="compute products of so many columns again: 3072 for gate and up")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step goes")
    arguments = parser.parse_args()
    if arguments.recompute:
        keep_all_but(arguments.recompute)
    global ONLY, PROFILE
    ONLY, PROFILE = arguments.only, arguments.profile
    SETTINGS["model.master_weights"] = not arguments.bf16_states
    if arguments.gpu:
        on_gpu(arguments.tiny, arguments.repeats)
    else:
        on_cpu(arguments.repeats)


if __name__ == "__main__":
    main()
