"""A whole agent step on one GPU: Palestra, TRL with vLLM colocated, and TRL at its default, one after the other.

    python benchmarks/agent_step.py [--groups 8] [--only palestra trl-vllm trl] [--vllm-path FOLDER] [--logs FOLDER]
    python benchmarks/agent_step.py --tiny --only palestra trl --groups 2     # on a CPU, two minutes
    python benchmarks/agent_step.py --small --only palestra --groups 32 --tool-ms 20     # steps that wait for tools

About 5 minutes on an H200, half of it vLLM's start. Each side trains the same model (Qwen3-0.6B's shape, random
weights, bfloat16) in a process of its own, through its own front door: groups of 8 rollouts of a prompt of 350
tokens, three rounds of a tool, then a final turn; loss, backward, optimizer, new weights in the sampler. A random
model calls no tool, so on both sides a call is found in each of the first three turns; turns end when the model
samples its end token, after 25 tokens on average. Lengths differ by luck, hence the ratio for each sampled token.

Palestra is at its defaults, so it keeps float32 master weights and writes its rollouts to disk. TRL's weights are
bfloat16, which is quicker; with `--trl-dtype float32`, as its default has it, they are their own master weights. The
rest is TRL's default: gradient checkpointing, bfloat16 autocast, fused AdamW, and with vLLM the importance
correction. A step is the time from the end of one to the end of the next; the first two do not count. `--small` is
SmolLM2-135M's shape instead. Palestra alone can be measured without TRL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout import ANSWER, NEVER, TURN_TOKENS, make_tokenizer, make_trl_call, words

SIDES = {"palestra": 12, "trl-vllm": 8, "trl": 3}  # and how many steps each takes
GROUP, ROUNDS, MAX_NEW_TOKENS = 8, 3, 512
SYSTEM = "Look it up."
WARM_UP = 2  # steps that do not count
RATE = 1e-9  # of learning: rewards are luck, and turns must keep their lengths (at 1e-5 one update of random weights
# changed them twentyfold)
TRL_ROWS = 64  # of one forward and backward
QWEN3_06B = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
SMALL = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}  # fmt: skip
TINY = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
TOOL_S = float(os.environ.get("AGENT_STEP_TOOL_S", "0"))  # that a call of the tool takes
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "WANDB_MODE": "disabled"}
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1", "MASTER_ADDR": "127.0.0.1"}  # fmt: skip


def lookup(q: str) -> str:
    """Looks something up.

    Args:
        q: The query.

    Returns:
        The answer.
    """
    time.sleep(TOOL_S)
    return ANSWER


def write_model(args: argparse.Namespace) -> None:
    """The model and its tokenizer, as a folder that all sides load."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    trl = find_spec("trl")  # not imported: it may be what fails
    folder, file = ("trl", "chat_templates/qwen3.jinja") if trl else ("palestra", "models/tiny/chat_template.jinja")
    template = (Path(find_spec(folder).origin).parent / file).read_text()  # type: ignore[union-attr,arg-type]
    shape = TINY if args.tiny else SMALL if args.small else QWEN3_06B
    tokenizer = make_tokenizer(template, shape["vocab_size"])
    config = Qwen3Config(
        **shape, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if args.tiny else torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        conversation(questions(args)[0]), tools=[lookup], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    end_turns_after(model, [tokenizer.eos_token_id], TURN_TOKENS, temperature=1.0)
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.pad_token_id, 0] += NEVER  # it ends our turns, too
    model.save_pretrained(args.model)
    tokenizer.save_pretrained(args.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tell("NAME", f"{parameters / 1e6:.1f} M weights, a prompt of {len(prompt)} tokens")


def end_turns_after(model: Any, end_ids: Sequence[int], tokens: float, temperature: float) -> None:
    """Set the weights of the end tokens so that turns have `tokens` tokens on average.

    Channel 0 of the hidden state becomes the same for every token (no layer adds to it), about 1 behind the last norm,
    and is all that the end tokens' logits depend on. The other tokens' logits are measured.
    """
    import torch

    body, head = model.model, model.get_output_embeddings().weight
    with torch.no_grad():
        for layer in body.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        body.embed_tokens.weight[:, 0] = 1.0
        head[:, 0] = 0.0 if head is not body.embed_tokens.weight else 1.0
        ids = torch.randint(0, len(head), (1, 256), generator=torch.Generator().manual_seed(0)).to(head.device)
        body.norm.weight[0] /= body(input_ids=ids).last_hidden_state[..., 0].float().mean()
        hidden = body(input_ids=ids).last_hidden_state[0]  # [256, H]
        logits = (hidden @ head.T).float() / temperature
        logits[:, list(end_ids)] = -math.inf
        wanted = logits.logsumexp(-1).mean().item() - math.log(len(end_ids) * max(tokens - 1, 1e-6))
        head[list(end_ids)] = 0.0
        head[list(end_ids), 0] = temperature * wanted


def questions(args: argparse.Namespace) -> list[str]:
    return [" ".join(words(5, seed)) for seed in range(args.groups * max(1, args.steps))]


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def tell(kind: str, text: str) -> None:
    """A line for the parent, whatever else is being written there."""
    sys.stdout.write(f"\n{kind} {text}\n")
    sys.stdout.flush()


def step_ended(step: int, steps: int, sampled: float, sampling_s: float) -> None:
    """Tell the parent; after the last one the process ends at once, without what follows a training."""
    tell("STEP", json.dumps({"at": time.time(), "sampled": sampled, "sampling_s": sampling_s}))
    if step == steps:
        sys.stderr.flush()
        os._exit(0)


def run_palestra(args: argparse.Namespace) -> None:
    from palestra import Agent, EvalSuite, measure, train_grpo
    from palestra.core.types import Finish, Message, SamplingParams, ToolCall
    from palestra.rollout.agent_loop import TokenSpeaker
    from palestra.train.watcher import Watcher

    tell("NAME", "Palestra")
    say = TokenSpeaker.generate

    async def calls(speaker: TokenSpeaker, sampling: SamplingParams) -> tuple[Message, Finish]:
        message, finish = await say(speaker, sampling)
        turns = sum(turn.maker == "model" for turn in speaker.turns)
        asked = (ToolCall(f"call_{turns}", "lookup", {"q": "x"}),) if turns <= ROUNDS else ()
        return replace(message, tool_calls=asked), finish

    TokenSpeaker.generate = calls  # type: ignore[method-assign]

    class Clock(Watcher):
        def advance(self, done: int, metrics: dict[str, float]) -> None:
            if "sample_seconds" in metrics:
                step_ended(done, args.steps, metrics["sampled_tokens"], metrics["sample_seconds"])

    @measure
    def luck(context: Any) -> float:
        return random.random()

    config = {
        "train": {"max_steps": args.steps, "problems_per_step": args.groups, "learning_rate": RATE},
        "rollout": {"group_size": GROUP, "temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS},
        "eval": {"cases": 1},
        "checkpoint": {"every": 0},
    }
    suite = EvalSuite.from_records([{"input": question} for question in questions(args)], measures=[luck])
    agent = Agent("agent-step", str(args.model), SYSTEM, tools=[lookup])
    train_grpo(agent, suite, config=config, held_out=0, watcher=Clock(), folder=args.out)


def run_trl(args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    use_vllm = args.side == "trl-vllm"
    tell("NAME", f"TRL {version('trl')}" + (f" + vLLM {version('vllm')}" if use_vllm else ""))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    make_trl_call(tokenizer, ROUNDS)
    last = {"sampled": 0.0, "sampling_s": 0.0}

    class Clock(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step_ended(state.global_step, args.steps, **last)

    rows, on_gpu = args.groups * GROUP, torch.cuda.is_available()
    if use_vllm and on_gpu and torch.cuda.get_device_capability()[0] == 9:
        # vLLM's own choice there; named, so that it tries no backend whose packages may be missing
        vllm_generation.LLM = partial(vllm_generation.LLM, attention_config={"backend": "FLASH_ATTN"})
    vllm = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 2048}
    config = GRPOConfig(
        output_dir=str(args.out), use_cpu=not on_gpu, bf16=on_gpu, per_device_train_batch_size=min(rows, TRL_ROWS),
        gradient_accumulation_steps=-(-rows // TRL_ROWS), num_generations=GROUP, temperature=1.0,
        max_completion_length=MAX_NEW_TOKENS, max_steps=args.steps, learning_rate=RATE, save_strategy="no",
        report_to="none", logging_steps=1, disable_tqdm=True, use_vllm=use_vllm, **(vllm if use_vllm else {}),
        model_init_kwargs={"dtype": args.trl_dtype if on_gpu else "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [conversation(question) for question in questions(args)]}),
        processing_class=tokenizer,
        tools=[lookup],
        callbacks=[Clock()],
    )
    generate = trainer._generate

    def counted(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = generate(*arguments)
        last.update(sampled=sum(map(sum, result[2])), sampling_s=time.perf_counter() - began)  # tool_mask: 1 if sampled
        return result

    trainer._generate = counted
    trainer.train()


@dataclass(frozen=True)
class Measurement:
    """What a side's log says of its steps."""

    name: str
    steps: Sequence[dict[str, float]]
    began: float

    @property
    def counts(self) -> bool:
        return len(self.steps) > WARM_UP

    @property
    def step_s(self) -> float:
        ends = [step["at"] for step in self.steps[WARM_UP - 1 :]]
        return statistics.median(after - before for before, after in pairwise(ends))

    def median(self, key: str) -> float:
        return statistics.median(step[key] for step in self.steps[WARM_UP:])

    def row(self, ours: Measurement | None) -> str:
        sampled = self.median("sampled")
        times = self.step_s / ours.step_s if ours else float("nan")
        each = times * ours.median("sampled") / sampled if ours else float("nan")
        cells = [self.name, f"{self.step_s:.3f}", f"{self.median('sampling_s'):.3f}", f"{sampled:.0f}", f"{times:.2f}",
                 f"{each:.2f}", f"{self.steps[0]['at'] - self.began:.0f}", str(len(self.steps) - WARM_UP)]  # fmt: skip
        return f"| {' | '.join(cells)} |"


def measure_side(side: str, args: argparse.Namespace, folder: Path) -> Measurement:
    """Run one side in a process of its own; whatever is left of it is ended."""
    steps = (args.steps or SIDES[side]) if side in SIDES else 0
    command = [sys.executable, __file__, "--side", side, "--model", str(folder / "model"), "--out", str(folder / side),
               "--groups", str(args.groups), "--steps", str(steps), "--trl-dtype", args.trl_dtype]  # fmt: skip
    command += ["--tiny"] * args.tiny + ["--small"] * args.small
    env = os.environ | OFFLINE | {"AGENT_STEP_TOOL_S": str(args.tool_ms / 1000)}
    env |= {"PALESTRA_HOME": str(folder / "home")} | (VLLM if side == "trl-vllm" else {})
    if side == "trl-vllm" and args.vllm_path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), args.vllm_path]))
    log = Path(args.logs) / f"{side}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            reason = f"exit status {process.wait(args.limit)}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {args.limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    name = next((line.removeprefix("NAME ").strip() for line in lines if line.startswith("NAME ")), side)
    found = [json.loads(line.removeprefix("STEP ")) for line in lines if line.startswith("STEP ")]
    measured = Measurement(name, found, began)
    median = f", {measured.step_s:.3f} s a step" if measured.counts else ""
    print(f"{name}: {reason}, {len(found)} steps in {time.time() - began:.0f} s{median}", flush=True)
    if len(found) < steps or process.returncode:
        errors = [i for i, line in enumerate(lines) if re.match(r"(\[rank0\]: )?[\w.]+(Error|Exception)\b", line)]
        shown = [line[:300] for line in lines[: errors[-1] + 1 if errors else None] if line.strip()][-20:]
        print(*(f"    {line}" for line in shown), f"    all of it is in {log}", sep="\n", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help=f"prompts a step, each with {GROUP} rollouts")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=0, help=f"default {SIDES}")
    parser.add_argument("--limit", type=float, default=200, help="seconds that a side may take")
    parser.add_argument("--logs", default="agent-step-logs", help="where each side's output goes")
    parser.add_argument("--vllm-path", help="where vLLM is installed, if TRL's side alone shall find it")
    parser.add_argument("--trl-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--small", action="store_true", help="a model of 135 M weights")
    parser.add_argument("--tool-ms", type=float, default=0.0, help="that a call of the tool takes")
    parser.add_argument("--side", choices=["model", *SIDES], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.groups * GROUP > TRL_ROWS and args.groups * GROUP % TRL_ROWS:
        parser.error(f"--groups {args.groups}: TRL needs whole batches of {TRL_ROWS} rollouts; give a multiple of 8")
    if args.side:
        {"model": write_model, "palestra": run_palestra}.get(args.side, run_trl)(args)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        model = measure_side("model", args, folder)
        if not (folder / "model" / "config.json").exists():
            raise SystemExit("there is no model to measure with")
        measured = {side: measure_side(side, args, folder) for side in args.only}
    ours = measured.get("palestra")
    rows = [each.row(ours if ours and ours.counts else None) for each in measured.values() if each.counts]
    print(f"\n{args.groups} x {GROUP} rollouts, {ROUNDS} tool rounds, {model.name}; medians\n")
    print("| | s a step | of it sampling | tokens sampled | times ours | for each token | first step after s | steps |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", *rows, sep="\n")


if __name__ == "__main__":
    main()
