"""How fast a model samples here: the engine, naive batched sampling and transformers' `generate`.

    python benchmarks/sampling.py [--model Qwen/Qwen3-0.6B] [--threads 8] [--json]

All three sample the same number of tokens from the same prompts: in a single turn, and in a conversation with tool
results in between. No turn stops early, and tool results are fixed token ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from palestra.core.types import SamplingParams
from palestra.engine.supported import text_config
from palestra.models.loading import load_model
from palestra.policy.base import Policy
from palestra.policy.local import LocalPolicy
from palestra.policy.naive import NaivePolicy

SIDES = ("engine", "plain", "generate")  # plain is NaivePolicy
TOOL_RESULT_TOKENS = 32
SIZES = {"prompts": 8, "group_size": 8, "prompt_tokens": 128, "new_tokens": 64, "tool_rounds": 3}
Tokens = tuple[list[list[int]], list[list[list[int]]]]  # a prompt for each rollout, tool results [rollout][round]


async def through_policy(policy: Policy[Any], tokens: Tokens, group_size: int, new_tokens: int) -> int:
    """Sample all rollouts in one batch; siblings share their prompt. Return the number of sampled tokens."""
    prompts, results = tokens
    sessions = [s for prompt in prompts[::group_size] for s in policy.fork(policy.open(prompt), group_size)]

    async def rollout(index: int, session: Any) -> int:
        params = SamplingParams(new_tokens, seed=index)
        sampled = len((await policy.sample(session, params)).token_ids)
        for result in results[index]:
            policy.append(session, result)
            sampled += len((await policy.sample(session, params)).token_ids)
        policy.close(session)
        return sampled

    return sum(await asyncio.gather(*(rollout(i, s) for i, s in enumerate(sessions))))


def through_generate(model: Any, tokens: Tokens, new_tokens: int) -> int:
    """All rollouts in one batch, each turn from its first token on."""
    # The model's own would fill in an end token and top-k, hence replaced and not overridden by arguments.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, max_new_tokens=new_tokens)
    torch.manual_seed(0)
    (rows, results), sampled = tokens, 0
    for turn in range(len(results[0]) + 1):
        if turn:
            rows = [row + each[turn - 1] for row, each in zip(rows, results, strict=True)]
        ids = torch.tensor(rows, device=model.device)
        grown = model.generate(ids, attention_mask=torch.ones_like(ids))
        sampled += grown.numel() - ids.numel()
        rows = grown.tolist()
    return sampled


class Computed:
    """Counts the tokens that go through the model; the engine's runner does not always call the whole module."""

    def __init__(self, model: Any, runner: Any) -> None:
        self.total, self._launch = 0, runner.launch
        runner.launch = self._launched
        model.register_forward_pre_hook(self._called, with_kwargs=True)
        self._in_engine = False

    def start(self, side: str) -> None:
        self.total, self._in_engine = 0, side == "engine"

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_engine:
            self.total += (args[0] if args else kwargs["input_ids"]).numel()

    def _launched(self, chunks: Any) -> Callable[[bool], Any]:
        collect = self._launch(chunks)
        self.total += sum(chunk.count for chunk in chunks)

        def collected(until_one_ends: bool) -> Any:
            emitted = collect(until_one_ends)
            self.total += sum(len(e.token_ids) - 1 for e in emitted)  # several decode steps compute their own
            return emitted

        return collected


def measure(model_name: str, sizes: dict[str, int]) -> dict[str, dict[str, dict[str, float]]]:
    """Scenario -> side -> tokens/s, seconds, sampled and computed tokens."""
    model, rng = load_model(model_name).model.eval(), random.Random(0)
    vocabulary = text_config(model).vocab_size
    local, naive = LocalPolicy(model), NaivePolicy(model)
    computed = Computed(model, local.engine.runner)
    group, new = sizes["group_size"], sizes["new_tokens"]

    def draw(count: int) -> list[int]:
        return rng.choices(range(vocabulary), k=count)

    def run(side: str, tokens: Tokens, new_tokens: int) -> int:
        if side == "generate":
            return through_generate(model, tokens, new_tokens)
        return asyncio.run(through_policy(local if side == "engine" else naive, tokens, group, new_tokens))

    found: dict[str, dict[str, dict[str, float]]] = {}
    for rounds in dict.fromkeys([0, sizes["tool_rounds"]]):
        prompts = [prompt for _ in range(sizes["prompts"]) for prompt in [draw(sizes["prompt_tokens"])] * group]
        tokens: Tokens = (prompts, [[draw(TOOL_RESULT_TOKENS) for _ in range(rounds)] for _ in prompts])
        for side in SIDES:
            run(side, (prompts, [[] for _ in prompts]), min(4, new))  # warm-up
            computed.start(side)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            sampled = run(side, tokens, new)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            if sampled != len(prompts) * new * (rounds + 1):
                raise SystemExit(f"{side} sampled {sampled} tokens: memory or context is too small; use smaller sizes")
            numbers = {"tokens_per_s": round(sampled / wall_s, 1), "wall_s": round(wall_s, 4), "cpu_s": round(cpu_s, 4)}
            numbers |= {"sampled_tokens": sampled, "computed_tokens": computed.total}
            found.setdefault(f"{rounds} tool rounds", {})[side] = numbers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="palestra/tiny", help="a hub id or local folder")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads")
    parser.add_argument("--json", action="store_true")
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    found = measure(args.model, {name: getattr(args, name) for name in SIZES})
    if args.json:
        print(json.dumps(found))
    else:
        for name, side in ((name, side) for name in found for side in SIDES):
            times = found[name]["engine"]["tokens_per_s"] / found[name][side]["tokens_per_s"]
            shown = "  ".join(f"{key} {value:,}" for key, value in found[name][side].items())
            print(f"{name}: {side:8}  {shown}  engine {times:.2f} x as fast")


if __name__ == "__main__":
    main()
