"""Logits to tokens: temperature, truncation, a seed for each sequence, the chosen token's logprob; stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.core.errors import SettingError
from palestra.core.types import Matching, SamplingParams
from palestra.engine.session import Job


class SamplingRow(NamedTuple):
    """How to sample one row: its parameters, its place in the sequence, the tokens so far, and what may follow."""

    params: SamplingParams
    position: int
    tokens: Sequence[int]
    matching: Matching | None = None

    @classmethod
    def of(cls, job: Job) -> SamplingRow:
        assert job.params is not None
        return cls(job.params, len(job.session.token_ids), job.session.token_ids, job.matching)


def check_params(params: SamplingParams, has_tokenizer: bool) -> None:
    """Refuse what cannot be sampled; the message says what to change."""
    p = params
    rules = (  # formatted only if one is broken: this is asked for every turn
        (p.max_new_tokens >= 1, "max_new_tokens={p.max_new_tokens} samples nothing; use 1 or more"),
        (p.temperature >= 0, "temperature={p.temperature} is negative; use 0 (greedy) or more"),
        (0 < p.top_p <= 1, "top_p={p.top_p} is outside (0, 1]; 1 keeps every token"),
        (p.top_k >= 0, "top_k={p.top_k} is negative; 0 keeps every token"),
        (0 <= p.min_p <= 1, "min_p={p.min_p} is outside [0, 1]; 0 keeps every token"),
        (p.repetition_penalty > 0, "repetition_penalty={p.repetition_penalty} must be above 0; 1 is off"),
        (has_tokenizer or not p.stop, "stop strings need a tokenizer; give the engine one, or use stop_token_ids"),
        (all(p.stop), "an empty stop string would end every turn at once; leave it out"),
    )
    for holds, complaint in rules:
        if not holds:
            raise SettingError(complaint.format(p=p))


def uniforms(seeds: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One number in (0, 1) for each (seed, position): SplitMix64, so that a row's draw depends on nothing else."""
    with np.errstate(over="ignore"):
        if not isinstance(seeds, np.ndarray):
            seeds = np.array([int(s) & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
        seed = seeds.astype(np.uint64)
        x = _mix(seed) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = _mix(x + np.uint64(0x9E3779B97F4A7C15))
    # 22 bits: u is at most 1 - 2^-23, so u * total stays below total in float32
    return ((x >> np.uint64(42)).astype(np.float32) + np.float32(0.5)) / np.float32(1 << 22)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """A token [B] and its logprob [B] for each row of logits [B, V].

    The logprob is that of the distribution sampled from: after grammar, penalty, temperature and truncation.
    Temperature 0 takes the most likely token and reports its logprob at temperature 1.
    """
    logits = logits.float()
    only_temperature = all(row.matching is None and row.params.only_temperature for row in rows)
    if not only_temperature:
        logits = penalised(masked(logits, rows), rows)
    temperatures = [row.params.temperature for row in rows]
    if not {0.0, 1.0}.issuperset(temperatures):
        logits = logits / torch.tensor([t or 1.0 for t in temperatures], device=logits.device)[:, None]
    if not only_temperature:
        logits = truncated(logits, rows)
    probs = logits.softmax(-1)
    if not any(temperatures):
        tokens = logits.argmax(-1)
    else:
        draws = uniforms([row.params.seed for row in rows], [row.position for row in rows])
        tokens = by_inverse_cdf(probs, torch.from_numpy(draws).to(logits.device))
        if 0.0 in temperatures:
            greedy = torch.tensor(temperatures, device=logits.device) == 0.0
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log_()


def by_inverse_cdf(probs: Tensor, draws: Tensor) -> Tensor:
    """The token at which each row's cumulative probability passes its draw; never one of probability 0."""
    cumulative = probs.cumsum(-1)
    threshold = draws[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)
    return _possible(tokens, probs) if probs.is_cuda else tokens


def _possible(tokens: Tensor, probs: Tensor) -> Tensor:
    """The most likely token in place of one of probability 0. A GPU adds in parallel: sums that should be equal differ
    in their last bit, and once in a million tokens the draw falls in between."""
    return torch.where(probs.gather(1, tokens[:, None])[:, 0] > 0, tokens, probs.argmax(-1))


def masked(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """What a row's grammar does not allow becomes minus infinity; the other rows stay as they are."""
    masks = [(i, row.matching.allowed()) for i, row in enumerate(rows) if row.matching is not None]
    bits = {i: np.frombuffer(mask, np.uint8) for i, mask in masks if mask is not None}
    if not bits:
        return logits
    vocabulary = logits.shape[1]
    packed = np.zeros((len(bits), -(-vocabulary // 8)), np.uint8)  # a model may have more ids than its tokenizer
    for row, mask in zip(packed, bits.values(), strict=True):
        row[: len(mask)] = mask[: len(row)]
    each = torch.arange(8, dtype=torch.uint8, device=logits.device)
    unpacked = (torch.from_numpy(packed).to(logits.device)[:, :, None] >> each) & 1
    allowed = unpacked.view(len(bits), -1)[:, :vocabulary].bool()
    where = torch.tensor(list(bits), device=logits.device)
    return logits.index_copy(0, where, logits[where].masked_fill(~allowed, float("-inf")))


def penalised(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide positive logits, multiply negative ones, of tokens already in the sequence."""
    penalties = {i: row.params.repetition_penalty for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0}
    logits = logits.clone() if penalties else logits
    for i, penalty in penalties.items():
        seen = torch.tensor(list(set(rows[i].tokens)), device=logits.device)
        score = logits[i, seen]
        logits[i, seen] = torch.where(score > 0, score / penalty, score * penalty)
    return logits


def truncated(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """What `truncate` leaves, by the parameters of each row."""
    params = np.array([(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows], np.float32)
    if (params == (0, 1, 0)).all():
        return logits
    return truncate(logits, *torch.from_numpy(params).to(logits.device).T[:, :, None])


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Top-k, then top-p, then min-p; what falls out becomes minus infinity. The most likely token always stays."""
    vocabulary = logits.shape[1]
    top_k = torch.where(top_k > 0, top_k, float(vocabulary))
    top_p = torch.where(top_p < 1.0, top_p, 2.0)  # 2: rounding cuts nothing
    ordered, order = logits.sort(-1, descending=True)
    rank = torch.arange(vocabulary, device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    out = (before >= top_p) | (probs < min_p * probs[:, :1])
    out[:, 0] = False
    ordered = ordered.masked_fill(out, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


class StopStrings:
    """Decodes the tail of a turn and looks. A token has at least one byte, so a short tail is enough."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.usable = tokenizer is not None

    def found(self, turn_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """True when the turn's newest token completed a stop string."""
        if self._tokenizer is None:
            raise SettingError("stop strings need a tokenizer; give the engine one, or use stop_token_ids")
        longest = max(len(text.encode()) for text in stop)
        tail = self._tokenizer.decode(list(turn_ids[-longest - 4 :]), skip_special_tokens=False)
        return any(text in tail for text in stop)
