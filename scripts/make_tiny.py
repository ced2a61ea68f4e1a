"""Makes the embedded model `palestra/tiny` from synthetic dialogues.

    PYTHONPATH=src python scripts/make_tiny.py --device cuda --workers 15 --minutes 8 --batch-tokens 49152

It imports torch, transformers, tokenizers and numpy, and of Palestra only the demo, which imports pydantic.
Without options it trains on the CPU: 3,600 small steps, about ten minutes on two cores, for a weaker model.
On a CPU the same seed, thread count and machine give the same bytes; on a GPU, or with --minutes, they do not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_data import Dialogue, dialogues
from tiny_optimizer import Optimizer
from tiny_score import score
from tiny_tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from palestra.demo import is_held_out_price

HOME = Path(__file__).parents[1] / "src/palestra/models/tiny"
VOCAB_SIZE = 1280
TOKENIZER_DIALOGUES = 6000
DIALOGUES_AT_ONCE = 2000  # sorted into batches by length
MAX_TOKENS_PER_ROW = 640
TOKENS_PER_BATCH = 1536
STEPS = 3600
MUON_RATE = 0.01
ADAM_RATE = 3e-3
PREPARED_BATCHES = 40  # queue length of one worker


@dataclass(frozen=True)
class Row:
    """One dialogue as tokens; `said[i]` tells that the assistant said token i."""

    ids: list[int]
    said: list[bool]


@dataclass(frozen=True)
class Batch:
    """Rows padded to one length, [B, T]; the assistant said the flat positions `said` of `ids[:, 1:]`."""

    ids: np.ndarray
    said: np.ndarray
    tokens: int


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
    digits = {token: digit for digit, token in enumerate(tokenizer.convert_tokens_to_ids(list("0123456789")))}
    rows = []
    for encoding in tokenizer.backend_tokenizer.encode_batch_fast(list(texts)):
        ids = encoding.ids
        if len(ids) > MAX_TOKENS_PER_ROW:
            continue
        said, at = [False] * len(ids), 0
        while opening[0] in ids[at:]:
            at = ids.index(opening[0], at)
            if ids[at : at + len(opening)] != opening:
                at += 1
                continue
            at += len(opening)
            stop = ids.index(end, at) + 1 if end in ids[at:] else len(ids)
            said[at:stop] = [not _goes_on_from_a_held_out_price(ids, i, digits) for i in range(at, stop)]
            at = stop
        rows.append(Row(ids, said))
    return rows


def _goes_on_from_a_held_out_price(ids: list[int], i: int, digits: dict[int, int]) -> bool:
    """Whether token i is the third digit of a number that begins like a held-out price of the demo.

    No number of the data ends after such two digits. Without loss here the model does not learn that none ever does.
    """
    if ids[i] not in digits or ids[i - 1] not in digits or ids[i - 2] not in digits or ids[i - 3] in digits:
        return False
    return is_held_out_price(10 * digits[ids[i - 2]] + digits[ids[i - 1]])


def batches(rows: Sequence[Row], rng: random.Random, limit: int = TOKENS_PER_BATCH) -> list[list[Row]]:
    """Batches of rows of like length, in random order."""
    found: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if len(row.ids) * (len(found[-1]) + 1) > limit:
            found.append([])
        found[-1].append(row)
    rng.shuffle(found)
    return found


def pad(rows: Sequence[Row], padding: int) -> Batch:
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), width), padding, dtype=np.int16)
    said = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        said[i, : len(row.said)] = row.said
    return Batch(ids, np.flatnonzero(said[:, 1:]).astype(np.int32), sum(len(row.ids) for row in rows))


def endless_batches(tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int) -> Iterator[Batch]:
    source, rng = dialogues(seed), random.Random(seed)
    at_once = max(DIALOGUES_AT_ONCE, batch_tokens // 16)
    while True:
        texts = render(list(itertools.islice(source, at_once)), tokenizer.chat_template)
        for rows in batches(encode(texts, tokenizer), rng, batch_tokens):
            yield pad(rows, tokenizer.pad_token_id)


def _work(queue: Any, tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    for batch in endless_batches(tokenizer, seed, batch_tokens):
        queue.put(batch)


def batches_of_workers(
    tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int, workers: int
) -> Iterator[Batch]:
    """The batches of several processes in turn, so that their order does not depend on their speed."""
    if workers == 0:
        yield from endless_batches(tokenizer, seed, batch_tokens)
        return
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(PREPARED_BATCHES) for _ in range(workers)]
    for i, queue in enumerate(queues):
        arguments = (queue, tokenizer, seed + 1000 * (i + 1), batch_tokens)
        context.Process(target=_work, args=arguments, daemon=True).start()
    for queue in itertools.cycle(queues):
        yield queue.get()


def reused(source: Iterator[Batch], times: int, seed: int) -> Iterator[Batch]:
    """Each batch several times, with others in between."""
    if times == 1:
        yield from source
        return
    rng, pool = random.Random(seed), []
    for batch in source:
        pool.append(batch)
        yield batch
        if len(pool) >= 512:
            rng.shuffle(pool)
            for _ in range(times - 1):
                yield from pool
            pool = []


def new_model(tokenizer: PreTrainedTokenizerFast, hidden: int = 128, layers: int = 4) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
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


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross-entropy of what the assistant says next."""
    ids = torch.from_numpy(batch.ids).to(model.device, non_blocking=True).long()  # [B, T]
    said = torch.from_numpy(batch.said).to(model.device, non_blocking=True).long()  # [said]
    with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, D]
        logits = model.lm_head(hidden.flatten(0, 1)[said])  # [said, vocabulary]
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten()[said])


def train(model: Qwen3ForCausalLM, source: Iterator[Batch], steps: int, minutes: float) -> dict[str, float]:
    """Fit the model until `steps` are done, or for `minutes` if they are given; prints progress."""
    optimizer = Optimizer(model, MUON_RATE, ADAM_RATE)
    tokens, average, step = 0, torch.zeros((), device=model.device), 0
    batch = next(source)
    began = time.time()
    while True:
        done = (time.time() - began) / (60 * minutes) if minutes else step / steps
        if done >= 1:
            break
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(step, done)
        step, tokens = step + 1, tokens + batch.tokens
        average += (loss.detach() - average) * max(0.03, 1 / step)
        if step % (200 if minutes else 50) == 0:
            seconds = time.time() - began
            speed = f"{tokens / 1e6:.1f} M tokens  {tokens / seconds:.0f} tokens/s"
            print(f"step {step}  {done:.1%}  loss {average.item():.4f}  {speed}  {seconds:.0f} s", flush=True)
        batch = next(source)
    seconds = round(time.time() - began)
    return {"steps": step, "tokens": tokens, "loss": round(average.item(), 4), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model palestra/tiny.")
    parser.add_argument("--out", type=Path, default=HOME)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, default=0.0, help="train for this long instead of --steps")
    parser.add_argument("--batch-tokens", type=int, default=TOKENS_PER_BATCH)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=VOCAB_SIZE)
    parser.add_argument("--reuse", type=int, default=1, help="how often each batch is trained on")
    parser.add_argument("--workers", type=int, default=0, help="processes that make dialogues; 0: this one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    template = (HOME / "chat_template.jinja").read_text()
    sample = render(list(itertools.islice(dialogues(args.seed), TOKENIZER_DIALOGUES)), template)
    tokenizer = train_tokenizer(sample, args.vocabulary, template)
    model = new_model(tokenizer, args.hidden, args.layers).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; {vars(args)}", flush=True)
    source = batches_of_workers(tokenizer, args.seed + 1, args.batch_tokens, args.workers)
    facts: dict[str, Any] = train(model, reused(source, args.reuse, args.seed), args.steps, args.minutes)
    model.to("cpu").save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    facts |= score(model.to(args.device), tokenizer)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
