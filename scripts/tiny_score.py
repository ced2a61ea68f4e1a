"""How well a model copies: exact calls and answers for tools, arguments and entities that it has never seen."""

from __future__ import annotations

import random
from typing import Any

import torch
from tiny_open import World as OpenWorld
from tiny_open import conversion_tool, convert_task, lookup_tool, one_task
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CASES = 256
MAX_NEW_TOKENS = 64


def score(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 12345) -> dict[str, float]:
    """Shares of greedy calls with the right tool and names, of exact calls, and of answers with the right result.

    One tool, one question; the model is made to call and then to begin its answer with 'That is'.
    """
    rng = random.Random(seed)
    prompts, calls, answers, results = [], [], [], []
    for i in range(CASES):
        tool = conversion_tool(rng) if i % 3 == 0 else lookup_tool(rng, numeric=i % 3 == 1)
        world = OpenWorld(rng, [tool])
        task = (convert_task if i % 3 == 0 else one_task)(world)
        step = task.steps[0]
        arguments = dict(zip((a.name for a in tool.arguments), step.values, strict=True))
        function = {"name": tool.name, "arguments": arguments}
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
        chat: dict[str, Any] = {"tools": [tool.schema()], "tokenize": False, "add_generation_prompt": True}
        prompts.append(tokenizer.apply_chat_template(messages, **chat) + "<tool_call>")
        calls.append(function)
        value = world.know(tool, step.values)
        messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
        messages.append({"role": "tool", "content": str(value)})
        answers.append(tokenizer.apply_chat_template(messages, **chat) + "That is")
        results.append(f" {value}.")
    said = _generate(model, tokenizer, prompts)
    wanted = [_text(tokenizer, call) for call in calls]
    return {
        "right_tool": _share([f'"{call["name"]}"' in text for text, call in zip(said, calls, strict=True)]),
        "right_names": _share(
            [all(f'"{key}": ' in text for key in call["arguments"]) for text, call in zip(said, calls, strict=True)]
        ),
        "exact_calls": _share([text.startswith(whole) for text, whole in zip(said, wanted, strict=True)]),
        "exact_answers": _share(
            [text == whole for text, whole in zip(_generate(model, tokenizer, answers), results, strict=True)]
        ),
    }


def _text(tokenizer: PreTrainedTokenizerFast, function: dict[str, Any]) -> str:
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    whole = tokenizer.apply_chat_template([message], tokenize=False)
    return whole.partition("<tool_call>")[2].partition("</tool_call>")[0]


def _share(found: list[bool]) -> float:
    return round(sum(found) / len(found), 3)


@torch.no_grad()
def _generate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Greedy continuations, without special tokens' names at their end."""
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :])
    return [text.partition("<|im_end|>")[0] for text in texts]
