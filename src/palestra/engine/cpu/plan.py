"""One CPU step seen by attention: where the new KV goes, and which slots attend to what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from palestra.engine.attention import AttentionPlan, ScoreRule, attend_part, masked_score, merge_parts, with_sinks
from palestra.engine.cpu.kv_slots import KVSlots, SlotBuffer

MAX_PADDED_TOKENS = 64  # a longer chunk keeps the kernel busy by itself
MAX_PADDING = 1.5  # times the tokens of the shortest
MAX_SCORES = 1 << 20  # tokens times columns, so that masks stay small
Biases = dict[tuple[int | None, int], Tensor | None]  # by window, and queries of a KV head


def batches(counts: Sequence[int], own_lens: Sequence[int]) -> Iterator[slice]:
    """Which chunks, sorted by length, are attended in one go: all of one token, then short ones of about one length."""
    start = longest = 0
    for i, (count, own_len) in enumerate(zip(counts, own_lens, strict=True)):
        longest = max(longest, own_len)
        fits = count <= min(MAX_PADDED_TOKENS, MAX_PADDING * counts[start])
        fits = fits and (i + 1 - start) * count * longest <= MAX_SCORES
        if i > start and not (count == 1 or (fits and counts[start] > 1)):
            yield slice(start, i)
            start, longest = i, own_len
    yield slice(start, len(counts))


@dataclass(slots=True)
class SlotRows:
    """Slots that are attended in one go: one new token each, or short chunks, padded to the longest of them."""

    slots: KVSlots
    rows: list[int]  # of the own buffer
    counts: list[int]  # new tokens of each
    own_len: list[int]  # with the new tokens
    first: int  # of its tokens among the step's
    prefixes: SharedPrefixes | None
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window
    prefix_biases: Biases = field(default_factory=dict)
    tokens: int = field(init=False)
    count: int = field(init=False)
    width: int = field(init=False)
    last: Tensor = field(init=False)  # [n, count] the newest column of its slot that each place sees
    picked: slice | Tensor = field(init=False)
    to_places: Tensor | None = field(init=False)  # [n * count], the token of each place (padding repeats the last)
    to_tokens: Tensor | None = field(init=False)  # [tokens], the place of each token

    def __post_init__(self) -> None:
        self.tokens, self.count, self.width = sum(self.counts), max(self.counts), max(self.own_len)
        self.picked = _picked(self.rows)
        self.to_places = self.to_tokens = None
        step = torch.arange(self.count)
        counts, end = torch.tensor(self.counts)[:, None], torch.tensor(self.own_len)[:, None]
        self.last = torch.minimum(end - counts + step, end - 1)
        if self.tokens < len(self.counts) * self.count:
            starts = counts.cumsum(0) - counts
            self.to_places = (starts + torch.minimum(step, counts - 1)).view(-1)
            self.to_tokens = (step < counts).view(-1).nonzero()[:, 0]

    def bias(self, window: int | None, group: int) -> Tensor | None:
        """[n, 1, G * count, own width], which masks columns that a token must not see; None when it may see all."""
        if window not in self.biases:
            self.biases[window] = None
            cut = window is not None and self.width > window
            if self.count > 1 or min(self.own_len) < self.width or cut:
                columns, last = torch.arange(self.width), self.last[..., None]
                masked = columns > last
                if window is not None:
                    masked |= columns <= last - window
                bias = score_bias(masked, self.slots)[:, None]
                self.biases[window] = bias if self.count == 1 else bias.repeat(1, 1, group, 1)
        return self.biases[window]

    def attend(self, layer: int, q: Tensor, rule: ScoreRule) -> Tensor:
        """q [N, KV, G, D] of the step's tokens -> [tokens, KV, G, D]."""
        group, window = q.shape[2], rule.window
        q = q[self.first : self.first + self.tokens]
        if self.count > 1:  # [tokens, KV, G, D] -> [n, KV, G * count, D]
            if self.to_places is not None:
                q = q.index_select(0, self.to_places)
            q = q.unflatten(0, (-1, self.count)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        keys, values = _cut(self.slots.own, layer, self.picked, self.width)
        out, total = attend_part(q, keys, values, self.bias(window, group), rule)
        if self.prefixes is not None:
            # without a window the next steps of the batch have the same
            known, key = (self.prefixes.biases if window is None else self.prefix_biases), (window, group * self.count)
            if key not in known:
                known[key] = self.prefixes.bias(self.last, window, group)
            prefix, prefix_total = self.prefixes.attend(layer, q, known[key], rule)
            out, total = merge_parts(out, total, prefix, prefix_total), torch.logaddexp(total, prefix_total)
        if rule.sinks is not None:
            out = with_sinks(out, total, rule.sinks.view(-1, group).repeat_interleave(self.count, 1))
        if self.count == 1:
            return out
        out = out.unflatten(2, (group, self.count)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return out if self.to_tokens is None else out.index_select(0, self.to_tokens)


@dataclass(slots=True)
class SharedPrefixes:
    """Which slots share which row of the prefix buffer, so that a row is read once for all of them.

    `to_rows` [rows * members] picks the slot of each place (padding repeats the first one);
    `to_slots` [n] picks the place of each slot.
    """

    slots: KVSlots
    picked: slice | Tensor  # the rows
    members: int
    width: int
    to_rows: Tensor
    to_slots: Tensor
    prefix_len: Tensor  # [n], 0 for a slot without a prefix
    biases: Biases = field(default_factory=dict)

    @classmethod
    def of(cls, slots: KVSlots, chosen: Sequence[int]) -> SharedPrefixes | None:
        """These slots by prefix; None when no slot has one."""
        places: dict[int, list[int]] = {}
        lengths, without = [0] * len(chosen), list[int]()
        for i, row in enumerate(chosen):
            prefix = slots[row].prefix
            if prefix is None:
                without.append(i)
            else:
                places.setdefault(prefix.row, []).append(i)
                lengths[i] = prefix.length
        if not places:
            return None
        for i in without:  # it needs a place too, where all is masked for it
            min(places.values(), key=len).append(i)
        used, members = sorted(places), max(map(len, places.values()))
        span = range(used[0], used[-1] + 1)
        if len(span) <= 2 * len(used):  # a few too many cost less than a copy
            used = list(span)
        to_rows, to_slots = [0] * (len(used) * members), [0] * len(chosen)
        for i, row in enumerate(used):
            for place, slot in enumerate(places.get(row, ()), i * members):
                to_rows[place] = slot
                to_slots[slot] = place
        indices = torch.tensor(to_rows), torch.tensor(to_slots), torch.tensor(lengths)
        return cls(slots, _picked(used), members, max(lengths), *indices)

    def bias(self, last: Tensor, window: int | None, group: int) -> Tensor | None:
        """[rows, 1, members * group * count, width], which masks columns past a slot's prefix, and those that a window
        leaves out; None when there are none. `last` [n, count]: the newest column behind the prefix that is seen."""
        columns, length = torch.arange(self.width), self.prefix_len[:, None, None]
        masked = (columns >= length).expand(-1, last.shape[1], -1)
        if window is not None:
            masked = masked | (columns <= length + last[..., None] - window)
        elif not masked.any():
            return None
        places = score_bias(masked, self.slots).index_select(0, self.to_rows).repeat(1, group, 1)
        return places.view(-1, 1, self.members * places.shape[1], self.width)

    def _by_slot(self, x: Tensor, queries: int) -> Tensor:
        """[rows, KV, members * Q, ...] -> [n, KV, Q, ...]."""
        rows, heads, _, *rest = x.shape
        places = x.view(rows, heads, self.members, queries, *rest).transpose(1, 2)
        return places.reshape(-1, heads, queries, *rest).index_select(0, self.to_slots)

    def attend(self, layer: int, q: Tensor, bias: Tensor | None, rule: ScoreRule) -> tuple[Tensor, Tensor]:
        """q [n, KV, Q, D] over the slots' prefixes: [n, KV, Q, D] and its log-sum-exp [n, KV, Q]."""
        _, heads, queries, dim = q.shape
        places = q.index_select(0, self.to_rows).view(-1, self.members, heads, queries, dim)
        of_rows = places.transpose(1, 2).reshape(-1, heads, self.members * queries, dim)
        keys, values = _cut(self.slots.prefix, layer, self.picked, self.width)
        out, total = attend_part(of_rows, keys, values, bias, rule)
        return self._by_slot(out, queries), self._by_slot(total, queries)


def _picked(rows: list[int]) -> slice | Tensor:
    """Rows of a buffer: in place where they follow each other."""
    start = rows[0]
    return slice(start, start + len(rows)) if rows == list(range(start, start + len(rows))) else torch.tensor(rows)


def _cut(buffer: SlotBuffer, layer: int, picked: slice | Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values [rows, KV, width, D]: the first columns of these rows."""
    keys, values = buffer.keys[layer, :, :, :width], buffer.values[layer, :, :, :width]
    if isinstance(picked, slice):
        return keys[picked], values[picked]
    return keys.index_select(0, picked), values.index_select(0, picked)


@dataclass(slots=True)
class PrefillChunk:
    """Several tokens of one slot: `first`..`first + count` of the step's tokens."""

    slots: KVSlots
    row: int  # of the own buffer
    first: int
    count: int
    own_len: int  # with the new tokens
    biases: dict[int | None, Tensor] = field(default_factory=dict)  # by window

    def bias(self, window: int | None) -> Tensor:
        """[1, 1, count, prefix + own], which masks columns that a token must not see."""
        if window not in self.biases:
            length = self.slots[self.row].base + self.own_len
            columns, rows = torch.arange(length), torch.arange(length - self.count, length)[:, None]
            masked = columns > rows
            if window is not None:
                masked |= columns <= rows - window
            self.biases[window] = score_bias(masked, self.slots)[None, None]
        return self.biases[window]

    def attend(self, layer: int, q: Tensor, rule: ScoreRule) -> Tensor:
        """q [N, KV, G, D] of the step's tokens -> [count, KV, G, D]."""
        own, prefix, base, window = self.slots.own, self.slots[self.row].prefix, self.slots[self.row].base, rule.window
        # a KV head's queries as a batch, so that its keys are read in place
        q = q[self.first : self.first + self.count].permute(2, 1, 0, 3)

        def part(store: Tensor, row: int, length: int) -> Tensor:
            return store[layer, row, :, :length].expand(q.shape[0], -1, -1, -1)

        causal = window is None and self.own_len == self.count
        bias = None if causal else self.bias(window)[..., base:]
        keys, values = part(own.keys, self.row, self.own_len), part(own.values, self.row, self.own_len)
        out, total = attend_part(q, keys, values, bias, rule, causal)
        if prefix is not None:
            shared = self.slots.prefix
            keys, values = part(shared.keys, prefix.row, base), part(shared.values, prefix.row, base)
            bias = None if window is None else self.bias(window)[..., :base]
            before, before_total = attend_part(q, keys, values, bias, rule)
            out, total = merge_parts(out, total, before, before_total), torch.logaddexp(total, before_total)
        if rule.sinks is not None:
            out = with_sinks(out, total, rule.sinks.view(-1, q.shape[0]).T[..., None])
        return out.permute(2, 1, 0, 3)


def score_bias(masked: Tensor, slots: KVSlots) -> Tensor:
    """What is added to scores: 0, and `masked_score` where masked."""
    dtype = slots.own.keys.dtype
    return torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, masked_score(dtype))


@dataclass(slots=True)
class SlotPlan(AttentionPlan):
    """Plan of one step over slots: where new KV is written, and which keys each token attends to."""

    slots: KVSlots
    targets: Tensor  # [N * KV], rows of the flattened own buffer
    parts: list[SlotRows | PrefillChunk]  # in the order of the step's tokens

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        layer = self.kv_layer(module)
        own, (tokens, heads) = self.slots.own, (k.shape[2], k.shape[1])
        for store, new in ((own.keys, k), (own.values, v)):
            rows = new[0].transpose(0, 1).reshape(tokens * heads, -1)
            store[layer].view(-1, rows.shape[1]).index_copy_(0, self.targets, rows)
        q = q[0].transpose(0, 1).view(tokens, heads, -1, q.shape[-1])  # [N, KV, G, D]
        parts = [part.attend(layer, q, rule) for part in self.parts]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1, 2)[None]
