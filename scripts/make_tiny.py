"""Makes the embedded model `palestra/tiny` from synthetic dialogues.

    python scripts/make_tiny.py        # writes src/palestra/models/tiny; about 10 minutes on 2 cores

The same seed, thread count and machine give the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_data import Dialogue, dialogues
from tiny_optimizer import Optimizer
from tiny_tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

HOME = Path(__file__).parents[1] / "src/palestra/models/tiny"
VOCAB_SIZE = 1024
TOKENIZER_DIALOGUES = 6000
DIALOGUES_AT_ONCE = 2000  # sorted into batches by length
MAX_TOKENS_PER_ROW = 420
TOKENS_PER_BATCH = 1536
STEPS = 3600
MUON_RATE = 0.01
ADAM_RATE = 3e-3


@dataclass(frozen=True)
class Row:
    """One dialogue as tokens; `said[i]` tells that the assistant said token i."""

    ids: list[int]
    said: list[bool]


def render(many: Sequence[Dialogue], template: str) -> list[str]:
    """The dialogues as text, just as the chat template shows them to the model."""
    return [
        render_jinja_template([dialogue.messages], tools=dialogue.tools, chat_template=template)[0][0]
        for dialogue in many
    ]


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Rows of the texts that are not too long."""
    end = tokenizer.eos_token_id
    opening = tokenizer.encode("<|im_start|>assistant\n")
    rows = []
    for ids in tokenizer(list(texts))["input_ids"]:
        said, speaking = [], False
        for i, token in enumerate(ids):
            said.append(speaking)
            if token == end:
                speaking = False
            elif ids[max(0, i + 1 - len(opening)) : i + 1] == opening:
                speaking = True
        if len(ids) <= MAX_TOKENS_PER_ROW:
            rows.append(Row(ids, said))
    return rows


def batches(rows: Sequence[Row], rng: random.Random) -> list[list[Row]]:
    """Batches of rows of like length, in random order."""
    found: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if len(row.ids) * (len(found[-1]) + 1) > TOKENS_PER_BATCH:
            found.append([])
        found[-1].append(row)
    rng.shuffle(found)
    return found


def endless_batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[Row]]:
    source, rng = dialogues(seed), random.Random(seed)
    while True:
        texts = render(list(itertools.islice(source, DIALOGUES_AT_ONCE)), tokenizer.chat_template)
        yield from batches(encode(texts, tokenizer), rng)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def loss_of(model: Qwen3ForCausalLM, batch: Sequence[Row], pad: int) -> torch.Tensor:
    """Cross-entropy of what the assistant says next."""
    width = max(len(row.ids) for row in batch)
    ids = torch.tensor([row.ids + [pad] * (width - len(row.ids)) for row in batch], device=model.device)  # [B, T]
    said = torch.tensor([row.said + [False] * (width - len(row.said)) for row in batch], device=model.device)
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, D]
    logits = model.lm_head(hidden[said[:, 1:]])  # [said, vocabulary]
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][said[:, 1:]])


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Fit the model to dialogues, each seen once, with a progress line."""
    optimizer = Optimizer(model, steps, MUON_RATE, ADAM_RATE)
    began, tokens, average = time.time(), 0, 0.0
    for i, batch in enumerate(itertools.islice(endless_batches(tokenizer, seed), steps)):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batch, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(i)
        tokens += sum(len(row.ids) for row in batch)
        average += (loss.item() - average) * max(0.03, 1 / (i + 1))
        if (i + 1) % 50 == 0 or i + 1 == steps:
            seconds = time.time() - began
            left_s = seconds / (i + 1) * (steps - i - 1)
            print(
                f"step {i + 1}/{steps}  loss {average:.3f}  {tokens / 1e6:.2f} M tokens  "
                f"{tokens / seconds:.0f} tokens/s  {seconds:.0f} s, {left_s:.0f} s left",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model palestra/tiny.")
    parser.add_argument("--out", type=Path, default=HOME)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    template = (HOME / "chat_template.jinja").read_text()
    sample = render(list(itertools.islice(dialogues(args.seed), TOKENIZER_DIALOGUES)), template)
    tokenizer = train_tokenizer(sample, VOCAB_SIZE, template)
    model = new_model(tokenizer).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed + 1)
    model.to("cpu").save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
