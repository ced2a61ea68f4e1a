"""The tokens of one rollout as columns: maker, mask, logprobs, advantage."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array
from palestra.extras.dashboard.rollout_index import RolloutIndex, token_table
from palestra.extras.dashboard.rollout_row import turns_of

MAX_TOKENS = 20_000  # of one answer
_NUMBERS = ("logprob", "learner_logprob", "advantage", "ratio", "entropy", "gap")
# which token is the worst by each column: the one with the largest value of this
_BADNESS: Mapping[str, Callable[[Array], Array]] = {
    "gap": np.abs,
    "ratio": lambda ratio: np.abs(np.log(np.maximum(ratio, 1e-30))),
    "logprob": lambda logprob: -logprob,
    "entropy": lambda entropy: entropy,
}


def tokens(index: RolloutIndex, rollout_id: int, start: int, limit: int) -> dict[str, Any]:
    """The answer to `GET …/tokens`: a slice of the columns; worst tokens and ranges cover the whole rollout."""
    row = index.row(rollout_id)
    table = token_table(index.folder, row["step"]) if row["kind"] == "train" else None
    # the rollout's part of its step's token file is mapped, so that only its pages are read
    learned = None if table is None else table[row["token_start"] : row["token_start"] + row["tokens"]]
    columns = token_columns(index.record(row), learned)
    total, part = len(columns["ids"]), slice(start, start + min(limit, MAX_TOKENS))
    known = [name for name in _NUMBERS if not np.isnan(columns[name]).all()]
    decode = token_texts(index.folder)
    ids = columns["ids"][part].tolist()
    return {
        "total": total,
        "start": start,
        "ids": ids,
        "text": [decode(token) for token in ids],
        "maker": columns["maker"][part],
        "turn": columns["turn"][part].tolist(),
        "mask": columns["mask"][part].tolist(),
        "version": columns["version"][part].tolist(),
        **{name: [None if math.isnan(value) else value for value in columns[name][part].tolist()] for name in _NUMBERS},
        "known": known,
        "worst": {name: worst for name in known if name in _BADNESS and (worst := _worst(name, columns[name]))},
        "range": {name: [float(np.nanmin(columns[name])), float(np.nanmax(columns[name]))] for name in known},
    }


def token_columns(record: Mapping[str, Any], learned: Any = None) -> dict[str, Any]:
    """The columns of a rollout's line and of its token file, if any; NaN for missing values."""
    turns = [turn for turn in turns_of(record) if turn.get("token_ids")]
    lengths = [len(turn["token_ids"]) for turn in turns]
    total = sum(lengths)
    maker = [turn["maker"] for turn, length in zip(turns, lengths, strict=True) for _ in range(length)]
    by_model = np.array([name == "model" for name in maker], dtype=bool)
    nothing = np.full(total, np.nan)
    logprob = _concatenated([_logprobs(turn) for turn in turns])
    columns: dict[str, Any] = {
        "ids": _concatenated([np.asarray(turn["token_ids"], dtype=np.int64) for turn in turns]),
        "maker": maker,
        "turn": np.repeat(np.cumsum([turn["maker"] == "model" for turn in turns]), lengths),  # 0: the prompt
        "version": np.repeat([int(turn.get("policy_version") or 0) for turn in turns], lengths),
        "mask": by_model,
        "logprob": logprob,
        **dict.fromkeys(("learner_logprob", "advantage", "ratio", "entropy", "gap"), nothing),
    }
    if learned is None or len(learned) != total:
        return columns
    exact, own, ratio, entropy, advantage = (
        learned[name].astype(np.float64) for name in ("logprob", "learner_logprob", "ratio", "entropy", "advantage")
    )
    return columns | {
        "mask": np.asarray(learned["policy_mask"]),
        "logprob": np.where(np.isnan(exact), logprob, exact),
        "learner_logprob": own,
        "advantage": advantage,
        "ratio": ratio,
        "entropy": entropy,
        "gap": exact - own,
    }


def _logprobs(turn: Mapping[str, Any]) -> Array:
    known = turn.get("logprobs")
    if turn["maker"] != "model" or not known or len(known) != len(turn["token_ids"]):
        return np.full(len(turn["token_ids"]), np.nan)
    return np.array([math.nan if value is None else value for value in known], dtype=np.float64)


def _concatenated(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def _worst(name: str, values: Array) -> dict[str, Any] | None:
    bad = np.where(np.isnan(values), -np.inf, _BADNESS[name](values))
    place = int(bad.argmax())
    return {"index": place, "value": float(values[place])} if np.isfinite(bad[place]) else None


def token_texts(folder: RunFolder) -> Callable[[int], str]:
    """Function from token id to text, by the run's tokenizer; "#17" if there is none."""
    import palestra.models

    last = folder.last_checkpoint()
    folders = [folder.model, *([last] if last else []), folder.tokenizer]
    with suppress(PalestraError):  # a config that cannot be read names no model
        name = folder.config.model.name
        embedded = Path(palestra.models.__file__).parent / name.removeprefix("palestra/")
        folders.append(embedded if name.startswith("palestra/") else Path(os.path.expanduser(name)))
    for path in (path / "tokenizer.json" for path in folders):
        if os.path.isfile(path):  # False where Path.is_file raises: a name may be too long
            return _decoder(str(path), path.stat().st_mtime_ns)
    return lambda token: f"#{token}"


@lru_cache(maxsize=4)
def _decoder(path: str, changed: int) -> Callable[[int], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)

    @lru_cache(maxsize=1 << 16)
    def decode(token: int) -> str:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        piece = tokenizer.id_to_token(token)
        # part of a character, which only its neighbours complete
        return f"#{token}" if piece is None else piece if "\ufffd" in text or not text else text

    return decode
