"""GRPO in one file: sample, score, compare, reinforce.

    python examples/minimal_grpo.py            # well under a minute on a CPU

A shop assistant is asked what three of a thing cost. It has a tool that knows the price of one, but
often guesses instead, or shrugs, or looks up "red mugs" where the shop has a "red mug". Nobody shows
it a right answer: it tries eight times, each try is scored, and tries that beat their siblings become
more likely. That is all of GRPO. It takes torch, transformers and the weights that the package embeds.
"""

from __future__ import annotations

import argparse
import json
import random
from importlib.resources import files

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP = 8  # tries at each question: they are one another's baseline
QUESTIONS = 4  # questions in a step
PASSES = 2  # optimizer steps on the same tries; from the second on, clipping matters
LEARNING_RATE = 5e-4  # high, because the model is tiny; a model of billions wants about 1e-6
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # a little more room upwards keeps rare good tokens growing
MAX_NEW_TOKENS = 32

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "pink", "grey", "golden", "silver")
THINGS = ("lamp", "mug", "chair", "table", "desk", "clock", "pen", "book", "bag", "ball", "bowl", "plate", "hat")
ITEMS = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]


def price(item: str) -> int:
    """Look up the price of one item.

    Args:
        item: The name of the item.
    """
    raise NotImplementedError  # the lesson ends where the tool would be called; only its description is used


def reward(answer: str, item: str) -> float:
    """1 for exactly one call of the right tool with the right argument: a program can tell, no judge is needed."""
    before, found, rest = answer.partition("<tool_call>")
    call, closed, after = rest.partition("</tool_call>")
    if not (found and closed) or before.strip() or after.strip():
        return 0.0
    try:
        return float(json.loads(call) == {"name": "price", "arguments": {"item": item}})
    except ValueError:
        return 0.0


def encode(tokenizer, items: list[str]) -> tuple[Tensor, Tensor]:
    """Prompts as token ids and a mask, both [B, P]; padded on the left so that all answers start in one column."""
    messages = [[{"role": "user", "content": f"What do 3 {item}s cost?"}] for item in items]
    chat = {"tools": [price], "add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(turns, **chat) for turns in messages]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def sample(model, tokenizer, items: list[str]) -> tuple[Tensor, Tensor, int, list[str]]:
    """One answer to each question: ids [B, T], mask [B, T], the prompt's width P, and the answers as text."""
    prompt, prompt_mask = encode(tokenizer, items)
    # Sample from the model's whole distribution: cutting its tail would bias the ratio in the loss.
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ids = model.generate(prompt, attention_mask=prompt_mask, max_new_tokens=MAX_NEW_TOKENS, **how)
    answers = ids[:, prompt.shape[1] :]
    # Train on every token that was sampled, the end-of-turn token included, and on no padding after it.
    ended = (answers == tokenizer.eos_token_id).long()
    answer_mask = (ended.cumsum(1) - ended == 0).long()
    texts = [text.partition(tokenizer.eos_token)[0] for text in tokenizer.batch_decode(answers)]
    return ids, torch.cat([prompt_mask, answer_mask], dim=1), prompt.shape[1], texts


def logprobs(model, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """log p of each answer token given all before it, [B, T - P]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=ids.shape[1] - width + 1).logits
    # The logits at one position speak about the next token: shift by one.
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, width:, None])[..., 0]


def advantages(rewards: Tensor) -> Tensor:
    """[Q, G] how much better than its siblings each try was; a group that always or never succeeds teaches nothing."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def grpo_loss(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Raise the tokens of good tries, lower those of bad ones, while the policy stays near the one that tried."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    # The minimum is a pessimist: it never rewards moving further than the clip.
    per_token = -torch.minimum(ratio * advantage, clipped * advantage)
    return (per_token * mask).sum() / mask.sum()


def evaluate(model, tokenizer, items: list[str]) -> float:
    """Share of questions answered rightly, one try each."""
    texts = sample(model, tokenizer, items)[3]
    return sum(reward(text, item) for text, item in zip(texts, items, strict=True)) / len(items)


def main(steps: int = 15, seed: int = 0) -> tuple[float, float]:
    """Train, print, and give the share of right answers on unseen items before and after."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    home = str(files("palestra.models") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(home)
    model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()  # no dropout: old and new agree
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    items = rng.sample(ITEMS, len(ITEMS))
    held_out, training = items[:64], items[64:]
    before = evaluate(model, tokenizer, held_out)
    print(f"unseen items, before: {before:.0%} right")

    for step in range(1, steps + 1):
        asked = [item for item in rng.sample(training, QUESTIONS) for _ in range(GROUP)]
        ids, mask, width, texts = sample(model, tokenizer, asked)
        rewards = torch.tensor([reward(text, item) for text, item in zip(texts, asked, strict=True)])
        advantage = advantages(rewards.view(QUESTIONS, GROUP)).view(-1, 1)
        old = None
        for _ in range(PASSES):
            new = logprobs(model, ids, mask, width)
            old = new.detach() if old is None else old  # the policy that tried is the one before the first update
            loss = grpo_loss(new, old, advantage, mask[:, width:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        best = texts[int(rewards.argmax())].strip().replace("\n", "")
        print(f"step {step:2}  reward {rewards.mean():.2f}  {'█' * round(30 * rewards.mean().item()):30}  {best}")

    after = evaluate(model, tokenizer, held_out)
    print(f"unseen items, after:  {after:.0%} right")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)  # the model is so small that threads would mostly wait for each other
    main(**vars(parser.parse_args()))
