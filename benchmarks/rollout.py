"""A whole GRPO step, ours against TRL's GRPOTrainer: same model, prompts, group size and lengths.

    python benchmarks/rollout.py [single tools sleep] [--steps 3] [--threads 1]

Each side runs in a process of its own and prints CPU seconds and wall seconds for each step (sampling,
loss, backward, optimizer). A random model never calls a tool, so both sides are made to: TRL's parser is
told that a call was there, ours gets the tool's answer as the environment's reply. Turns end when the
model samples its end token, whose logit is raised so that a turn has about 25 tokens; in a single turn it is
lowered, so that all have 64. Turns of random length differ between the sides by luck, hence the second ratio,
for each sampled token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCENARIOS: dict[str, dict[str, Any]] = {
    "single": {"prompts": 8, "group": 8, "new": 64, "tools": 0, "sleep_s": 0.0, "target": 1.8, "by": "cpu_s"},
    "tools": {"prompts": 2, "group": 8, "new": 256, "tools": 3, "sleep_s": 0.0, "target": 6.0, "by": "cpu_s"},
    "sleep": {"prompts": 4, "group": 8, "new": 256, "tools": 3, "sleep_s": 0.2, "target": 5.0, "by": "wall_s"},
}
TURN_TOKENS = 25
NEVER = -20.0  # a logit
ANSWER = "the answer is forty two " * 2
SYSTEM = "You look things up before you answer. " * 6  # with the tool's description, a prompt of about 510 tokens


async def lookup(q: str) -> str:
    """Looks something up.

    Args:
        q: The query.

    Returns:
        The answer.
    """
    await asyncio.sleep(lookup.sleep_s)  # type: ignore[attr-defined]
    return ANSWER


def build(scenario: dict[str, Any]) -> tuple[Any, Any]:
    """A 4-layer Qwen3 of width 256 and a tokenizer of 1,000 tokens with Qwen3's chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = make_tokenizer(qwen3_chat_template, 1000)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    ends = math.log((len(tokenizer) - 1) / (TURN_TOKENS - 1)) if scenario["tools"] else NEVER
    raise_logits(model, {tokenizer.eos_token_id: ends, tokenizer.pad_token_id: NEVER})  # the latter ends our turns too
    return model, tokenizer


def make_tokenizer(chat_template: str, size: int) -> Any:
    """A byte-pair tokenizer; of the tokens beyond the first thousand, text has none, but a model may sample them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    added = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, 1000) - len(added),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([" ".join(words(30, i)) for i in range(400)] + [chat_template] * 3, trainer)
    whole = json.loads(core.to_str())
    vocabulary = whole["model"]["vocab"]
    for token_id in range(len(vocabulary), size - len(added)):
        vocabulary[f"Ġfiller{token_id}"] = token_id
    core = Tokenizer.from_str(json.dumps(whole))
    core.add_tokens(added)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def raise_logits(model: Any, by: Mapping[int, float]) -> None:
    """Add to some tokens' logits through the weights: channel 0 is kept constant for it."""
    import torch

    width = model.config.hidden_size
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 10.0  # far above the others, so that the last norm gives sqrt(width)
        for token_id, added in by.items():
            model.model.embed_tokens.weight[token_id, 0] += added
        model.model.norm.weight[0] = width**-0.5


def words(n: int, seed: int) -> list[str]:
    luck = random.Random(seed)
    return ["".join(luck.choices("abcdefghijklmnopqrstuvwxyz", k=luck.randint(2, 6))) for _ in range(n)]


def conversations(scenario: dict[str, Any], steps: int) -> list[list[dict[str, str]]]:
    system = [{"role": "system", "content": SYSTEM}] if scenario["tools"] else []
    n = scenario["prompts"] * (steps + 2)
    return [[*system, {"role": "user", "content": " ".join(words(8, 1000 + i))}] for i in range(n)]


def run_trl(scenario: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """TRL's trainer; one record for each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = build(scenario)
    make_trl_call(tokenizer, scenario["tools"])
    records: list[dict[str, float]] = []
    counts = {"sampled": 0, "prefilled": 0}

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.wall, self.cpu, self.before = time.perf_counter(), time.process_time(), dict(counts)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            record = {"wall_s": time.perf_counter() - self.wall, "cpu_s": time.process_time() - self.cpu}
            records.append(record | {k: counts[k] - self.before[k] for k in counts})

    rows = scenario["prompts"] * scenario["group"]
    config = GRPOConfig(
        output_dir="/tmp/palestra-bench-trl", use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=rows, num_generations=scenario["group"], max_completion_length=scenario["new"],
        max_steps=steps, logging_steps=1, report_to="none", save_strategy="no", beta=0.0, loss_type="dapo",
        disable_tqdm=True, learning_rate=1e-5,
    )  # fmt: skip
    luck = random.Random(0)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [luck.random() for _ in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": conversations(scenario, steps)}),
        processing_class=tokenizer,
        tools=[lookup] if scenario["tools"] else None,
        callbacks=[Clock()],
    )
    once = trainer._generate_single_turn

    def counted(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = once(prompt_ids, *args, **kwargs)
        counts["prefilled"] += sum(map(len, prompt_ids))
        counts["sampled"] += sum(map(len, result[0]))
        return result

    trainer._generate_single_turn = counted
    trainer.train()
    return records


def make_trl_call(tokenizer: Any, rounds: int) -> None:
    """Let TRL find a call of the tool in each of the first turns, up to so many."""
    import trl.trainer.grpo_trainer as grpo

    response = tokenizer.convert_tokens_to_ids("<tool_response>")
    parse = grpo.parse_response

    def forced(tokenizer: Any, ids: Any, prefix: Any = None, tools: Any = None) -> Any:
        parsed = parse(tokenizer, ids, prefix=prefix, tools=tools)
        parsed.pop("tool_calls", None)
        if prefix.count(response) < rounds and ids and ids[-1] == tokenizer.eos_token_id:
            parsed["tool_calls"] = [{"type": "function", "function": {"name": "lookup", "arguments": {"q": "x"}}}]
        return parsed

    grpo.parse_response = forced


@dataclass
class Lookups:
    """The environment: `rounds` answers of the tool, then a random score."""

    scenario: dict[str, Any]
    steps: int
    luck: random.Random

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return {}

    def problems(self, split: str) -> Sequence[Any]:
        from palestra.core.types import Message, Problem

        return [
            Problem(str(i), tuple(Message(m["role"], m["content"]) for m in row))  # type: ignore[arg-type]
            for i, row in enumerate(conversations(self.scenario, self.steps))
        ]

    def open(self, problem: Any) -> Any:
        return Episode(self, problem.input)


@dataclass
class Episode:
    world: Lookups
    prompt: Sequence[Any]

    @property
    def tools(self) -> Sequence[Any]:
        from palestra.agents.tools.tool import as_tool

        return [as_tool(lookup)] if self.world.scenario["tools"] else []

    async def reply(self, messages: Sequence[Any]) -> Sequence[Any]:
        from palestra.core.types import Message

        if sum(m.role == "tool" for m in messages) >= self.world.scenario["tools"]:
            return []
        return [Message("tool", await lookup("x"), name="lookup")]

    async def score(self, messages: Sequence[Any], tool_results: Sequence[Any]) -> Mapping[str, Any]:
        from palestra.core.types import Score

        return {"random": Score(self.world.luck.random(), True)}

    def close(self) -> None: ...


def run_ours(scenario: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """Our collector, engine and learner; one record for each step."""
    from palestra.core.config import RunConfig
    from palestra.learner.local import LocalLearner
    from palestra.models.chat.template import ChatFormat
    from palestra.policy.local import LocalPolicy
    from palestra.train.batch import group_advantages, to_batch
    from palestra.train.tasks import agent_collector
    from palestra.train.update import coefficients_at, update

    model, tokenizer = build(scenario)
    rollout = {"group_size": scenario["group"], "temperature": 1.0, "max_new_tokens": scenario["new"]}
    config = RunConfig.build({"train": {"mask_truncated": False}, "rollout": rollout})
    policy = LocalPolicy(model, tokenizer)
    world = Lookups(scenario, steps, random.Random(0))
    collector = agent_collector(world, policy, ChatFormat(tokenizer), config, training=True)  # type: ignore[arg-type]
    learner = LocalLearner(model, config=config, pad_token_id=tokenizer.pad_token_id)
    problems, n = world.problems("train"), scenario["prompts"]
    records = []
    fed = count_fed(policy)
    with asyncio.Runner() as runner:
        for step in range(steps):
            wall, cpu, before = time.perf_counter(), time.process_time(), fed[0]
            batch = problems[step * n : (step + 1) * n]
            keys = [f"{step}/{i}" for i in range(len(batch))]
            groups = runner.run(collector.collect(batch, scenario["group"], keys))
            sampling = time.process_time() - cpu
            advantages = group_advantages(groups, config.train, world.reward_weights)
            batch = to_batch(groups, advantages, mask_truncated=False)
            update(learner, batch, config, coefficients_at(step, config, None, entropy=0.0), version=step)
            policy.update(learner.weights(step + 1))
            sampled = sum(r.sampled_tokens for g in groups for r in g.rollouts)
            record = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            records.append(
                record | {"sampling_cpu_s": sampling, "sampled": sampled, "prefilled": fed[0] - before - sampled}
            )
    return records


def count_fed(policy: Any) -> list[int]:
    """A counter of the tokens that the engine computes."""
    total, step = [0], policy.engine.runner.step

    def counted(chunks: Any) -> Any:
        total[0] += sum(chunk.count for chunk in chunks)
        return step(chunks)

    policy.engine.runner.step = counted
    return total


def measure(side: str, name: str, steps: int, threads: int) -> dict[str, float]:
    """Run one side in a fresh process; the mean of its steps after the first."""
    command = [sys.executable, __file__, name, "--side", side, "--steps", str(steps), "--threads", str(threads)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RECORDS ")]
    if not lines:
        raise SystemExit(f"{side} failed on {name}:\n{done.stderr[-3000:]}")
    records = json.loads(lines[-1].removeprefix("RECORDS "))[1:]
    return {key: sum(r[key] for r in records) / len(records) for key in records[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=["trl", "ours"])
    args = parser.parse_args()
    if args.side:
        import torch

        torch.set_num_threads(args.threads)
        scenario = SCENARIOS[args.scenarios[0]]
        lookup.sleep_s = scenario["sleep_s"]  # type: ignore[attr-defined]
        records = (run_trl if args.side == "trl" else run_ours)(scenario, args.steps)
        print("RECORDS", json.dumps(records))
        return
    for name in args.scenarios or SCENARIOS:
        trl, ours = (measure(side, name, args.steps, args.threads) for side in ("trl", "ours"))
        by = SCENARIOS[name]["by"]
        print(json.dumps({"scenario": name, "trl": rounded(trl), "ours": rounded(ours)}))
        times = trl[by] / ours[by]
        per_token = times * ours["sampled"] / trl["sampled"]
        target = SCENARIOS[name]["target"]
        print(f"{name}: {times:.2f} x less {by} (target {target}); a sampled token {per_token:.2f} x", flush=True)


def rounded(record: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in record.items()}


if __name__ == "__main__":
    main()
