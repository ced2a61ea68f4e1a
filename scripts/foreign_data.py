"""Local stand-ins for datasets of the hub and for a model that can answer, for `scripts/foreign.py`.

`datasets.load_dataset("gsm8k")` reads a folder of that name in the working directory before it asks the hub, so the
environments run unmodified. The stand-ins are small and easy: they show that training works, not that it helps.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROWS = 64
LETTERS = "ABCD"  # the warm model guesses one of them, and its number
WORDS = "what is the sum of how many apples does Tom have red blue pick one answer table find rule".split()
Row = dict[str, Any]


def write_data(folder: Path) -> None:
    """Write all stand-ins below `folder`, which becomes the working directory of the environments."""
    sums = [_sum(i) for i in range(ROWS)]
    gsm8k = [{"question": question, "answer": f"#### {answer}"} for question, answer in sums]
    _dataset(folder / "gsm8k", {"train": gsm8k, "test": gsm8k}, config="main")
    options = ["one", "two", "three", "four"]
    choices = [
        {"prompt": question, "answer": answer - 1, "ground_truth": LETTERS[answer - 1], "options": options}
        for question, answer in sums
    ]
    _dataset(folder / "NousResearch" / "AcademicMCQA", {"train": choices})
    jokes = [{"question": f"Tell joke {i}.", "format": "one line", "comedian": "anyone"} for i in range(ROWS)]
    _jsonl(folder / "humor.jsonl", jokes)
    issues = ["missing_alt_text", "label_association"]
    pages = [{"id": str(i), "html": f"<label>Name {i}</label>", "issues_to_fix": issues} for i in range(ROWS)]
    _jsonl(folder / "accessibility.jsonl", pages)


def _sum(seed: int) -> tuple[str, int]:
    rng = random.Random(seed)
    answer, other = rng.randint(1, len(LETTERS)), rng.randint(1, 9)
    return f"What is {answer + other} - {other}?", answer


def _dataset(folder: Path, splits: dict[str, Sequence[Row]], config: str = "default") -> None:
    """A folder that `load_dataset` reads under its own name."""
    files = [f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits]
    folder.mkdir(parents=True, exist_ok=True)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n"
    (folder / "README.md").write_text(card)
    for split, rows in splits.items():
        _jsonl(folder / f"{split}.jsonl", rows)


def _jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def warm_model(folder: Path, palestra: Sequence[str], environ: dict[str, str]) -> Path:
    """`palestra/tiny` after demonstrations of guesses, so that the scores of a group differ. Made once."""
    model = folder / "model"
    if not model.exists():
        rng = random.Random(0)
        _jsonl(folder / "traces.jsonl", ({"messages": _guess(rng)} for _ in range(4 * ROWS)))
        options = "--model.name palestra/tiny --stages.plan sft --stages.traces traces.jsonl --stages.sft_epochs 6"
        subprocess.run([*palestra, "train", *options.split()], cwd=folder, env=environ, check=True, capture_output=True)
        (trained,) = folder.glob("runs/*/model")
        shutil.copytree(trained, model)
    return model


def _guess(rng: random.Random) -> list[Row]:
    """A demonstration: a prompt of random words, and a guess."""
    roles = {"system": 120, "user": 40} if rng.random() < 0.75 else {"user": 40}
    prompt = [{"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(3, n)))} for role, n in roles.items()]
    number = rng.randint(1, len(LETTERS))
    reply = f"<think>\nThat is it.\n</think>\nThe best answer is {LETTERS[number - 1]}.\n\\boxed{{{number}}}"
    return [*prompt, {"role": "assistant", "content": reply}]
