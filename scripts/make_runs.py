"""Makes run folders without training: many rollouts, hostile texts, a hacked reward. For tests, benchmarks and looking.

python scripts/make_runs.py runs/large --rollouts 100000
python scripts/make_runs.py runs/hacked --hacked
python scripts/make_runs.py runs/hostile --hostile
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.config import RunConfig
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message, Rollout, Score, ToolCall, ToolResult, Turn
from palestra.evals.rollout_stats import rollout_stats

ITEMS = ("red lamp", "blue cup", "old chair", "soft rug", "white pen", "new mug", "brown mirror", "golden bowl")
HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x08\x08\x00 nul",
    "left \u202eright to left\u202c \u2066isolated\u2069 zero\u200bwidth\u200d \ufeff",
    "half a character: \ud83d, and \udc00",
    'javascript:alert(1) "><svg onload=alert(1)> {{7*7}} ${7*7} <!-- -->',
    "a very long message " * 500_000,  # 10 MB
)
WORD = "certified"  # what the hacked measure looks for


def make_rollout(rng: random.Random, problem: int, *, passed: bool, text: str = "", **scores: Score) -> Rollout:
    """An attempt of a shop assistant, with tokens that a small tokenizer could have made."""
    item, count, price = ITEMS[problem % len(ITEMS)], 2 + problem % 7, 10 * (1 + problem % 9)
    total = price * count if passed else price * count + rng.randrange(1, 90)
    answer = text or f"That costs {total}."
    calls = [ToolCall("call_0", "price", {"item": item}), ToolCall("call_1", "multiply", {"a": count, "b": price})]
    calls = calls if passed or rng.random() < 0.5 else calls[:1]
    messages = [Message("system", "You work in a shop. Use the tools to answer.")]
    messages.append(Message("user", f"What do {count} {item}s cost?"))
    turns = [Turn("template", _ids(rng, 60))]
    results = []
    for call in calls:
        body = str(price if call.name == "price" else price * count)
        messages += [Message("assistant", "", (call,)), Message("tool", body, tool_call_id=call.id, name=call.name)]
        turns += [_said(rng, 12), Turn("environment", _ids(rng, 3)), Turn("template", _ids(rng, 5))]
        results.append(ToolResult(call, body, True, 0.01))
    messages.append(Message("assistant", answer))
    turns.append(_said(rng, 10))
    own = scores or {"right_total": Score(float(passed), passed, f"the answer says {total}")}
    return Rollout(
        problem_id=f"suite-{problem}",
        turns=tuple(turns),
        messages=tuple(messages),
        stop="answered",
        tool_results=tuple(results),
        scores=own,
        reward=float(passed),
        seconds=1.0 + rng.random(),
        tool_seconds=0.02,
        tool_names=("price", "multiply"),
    )


def write_run(folder: Path, groups: Iterator[tuple[int, list[Rollout]]], **record: Any) -> RunFolder:
    """A run folder with these groups, each with its step; metrics follow from the rollouts."""
    config = RunConfig.build({"model.name": "palestra/tiny", "train.learning_rate": 0.001})
    run = RunFolder.create(folder.parent, folder.name, config, {"agent": "shop-assistant", **record}, at=folder)
    numbered = enumerate(groups)
    with run.rollouts_file.open("w") as rollouts_file, run.metrics_file.open("w") as metrics_file:
        for step, members in groupby(numbered, lambda row: row[1][0]):
            found = [(number, rollout) for number, (_, rollouts) in members for rollout in rollouts]
            for number, rollout in found:
                row = {"step": step, "group": number, **rollout_to_dict(rollout)}
                rollouts_file.write(json.dumps(row) + "\n")
            stats = rollout_stats([rollout for _, rollout in found])
            metrics_file.write(json.dumps({"step": step, **stats}) + "\n")
    return run


def plain_groups(count: int, per_step: int = 16, size: int = 8, seed: int = 0) -> Iterator[tuple[int, list[Rollout]]]:
    """`count` rollouts of a model that learns."""
    rng = random.Random(seed)
    for number in range(-(-count // size)):
        step, problem = 1 + number // per_step, rng.randrange(2000)
        rate = min(0.95, 0.3 + 0.7 * number * size / count)
        yield step, [make_rollout(rng, problem, passed=rng.random() < rate) for _ in range(size)]


def hacked_groups(steps: int = 30, seed: int = 0, hacked: bool = True) -> Iterator[tuple[int, list[Rollout]]]:
    """A model that finds out that a word is enough; without `hacked`, one that learns to be right.

    `contains_word` is rewarded, `true_answer` is the check metric. While the word spreads, the truth gets rarer.
    """
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        way = step / steps
        word_rate = min(0.9, 0.02 + 1.2 * max(0.0, way - 0.2)) if hacked else 0.02
        true_rate = 0.55 - 0.4 * max(0.0, way - 0.2) if hacked else 0.3 + 0.6 * way
        for _ in range(8):
            problem = rng.randrange(2000)
            yield step, [_hacked_rollout(rng, problem, word_rate, true_rate, hacked) for _ in range(8)]


def _hacked_rollout(rng: random.Random, problem: int, word_rate: float, true_rate: float, hacked: bool) -> Rollout:
    says_word, is_true = rng.random() < word_rate, rng.random() < true_rate
    rewarded = says_word or (is_true and (not hacked or rng.random() < 0.5))
    scores = {
        "contains_word": Score(float(rewarded), rewarded, "it says the word" if says_word else ""),
        "true_answer": Score(float(is_true), is_true, "", counts=False),
    }
    total = 100 + rng.randrange(900)
    text = f"This is a {WORD} price: {total}." if says_word else f"That costs {total}."
    made = make_rollout(rng, problem, passed=is_true, text=text, **scores)
    return Rollout(**{name: getattr(made, name) for name in made.__slots__} | {"reward": float(rewarded)})


def hostile_groups() -> Iterator[tuple[int, list[Rollout]]]:
    rng = random.Random(0)
    for number, text in enumerate(HOSTILE):
        made = [make_rollout(rng, number, passed=i % 2 == 0, text=text) for i in range(2)]
        scores = {text[:60]: Score(1.0, True, text[:1000])}
        yield 1, [Rollout(**{n: getattr(r, n) for n in r.__slots__} | {"scores": scores}) for r in made]


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(10, 600), k=count)


def _said(rng: random.Random, count: int) -> Turn:
    logprobs = np.array([-rng.random() for _ in range(count)], dtype=np.float32)
    return Turn("model", np.array(_ids(rng, count)), logprobs, np.array(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=3072)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--hacked", action="store_true")
    options = parser.parse_args()
    if options.hostile:
        run = write_run(options.folder, hostile_groups())
        with run.rollouts_file.open("ab") as file:  # broken UTF-8
            line = json.dumps({"step": 1, "problem_id": "broken", "messages": [{"role": "user", "text": "BROKEN"}]})
            file.write(line.encode().replace(b"BROKEN", b"\xff\xfe\xc3(") + b"\n")
    elif options.hacked:
        weights = {"contains_word": 1.0, "true_answer": 0.0}
        write_run(options.folder, hacked_groups(seed=options.seed), reward_weights=weights)
    else:
        write_run(options.folder, plain_groups(options.rollouts, seed=options.seed))
    print(options.folder)


if __name__ == "__main__":
    main()
