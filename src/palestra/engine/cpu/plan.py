"""One CPU step seen by attention: where the new KV goes, and which slots attend to what."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from palestra.engine.attention import attend_part, masked_score, merge_parts
from palestra.engine.cpu.kv_slots import KVSlots


@dataclass(slots=True)
class DecodeRows:
    """Slots 0..n-1, one token each, attended in one go."""

    slots: KVSlots
    own_len: list[int]  # by slot, the new token included
    width: int
    prefixes: SharedPrefixes | None
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window
    prefix_biases: dict[int | None, Tensor | None] = field(default_factory=dict)

    def bias(self, window: int | None) -> Tensor | None:
        """[n, 1, 1, own width], which masks columns that a slot must not see; None when it may see all."""
        if window not in self.biases:
            self.biases[window] = None
            if min(self.own_len) < self.width or (window is not None and self.width > window):
                columns, last = torch.arange(self.width), torch.tensor(self.own_len)[:, None] - 1
                masked = columns > last
                if window is not None:
                    masked |= columns <= last - window
                self.biases[window] = score_bias(masked, self.slots)[:, None, None]
        return self.biases[window]

    def prefix_bias(self, prefixes: SharedPrefixes, window: int | None, group: int) -> Tensor | None:
        if window is None:
            return prefixes.bias(group)
        if window not in self.prefix_biases:
            self.prefix_biases[window] = prefixes.window_bias(torch.tensor(self.own_len), window, group)
        return self.prefix_biases[window]

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [n, KV, G, D] -> [n, KV, G, D]."""
        own, n = self.slots.own, q.shape[0]
        keys, values = own.keys[layer, :n, :, : self.width], own.values[layer, :n, :, : self.width]
        out, total = attend_part(q, keys, values, self.bias(window), scale, softcap)
        if self.prefixes is None:
            return out
        bias = self.prefix_bias(self.prefixes, window, q.shape[2])
        return merge_parts(out, total, *self.prefixes.attend(layer, q, bias, scale, softcap))


@dataclass(slots=True)
class SharedPrefixes:
    """Which slots share which row of the prefix buffer, so that a row is read once for all of them.

    `to_rows` [rows * members] picks the slot of each place (padding repeats slot 0);
    `to_slots` [n] picks the place of each slot.
    """

    slots: KVSlots
    rows: int
    members: int
    width: int
    to_rows: Tensor
    to_slots: Tensor
    prefix_len: Tensor  # [n], 0 for a slot without a prefix
    biases: dict[int, Tensor | None] = field(default_factory=dict)  # by query heads a KV head

    @classmethod
    def of(cls, slots: KVSlots, n: int) -> SharedPrefixes | None:
        """The first n slots by prefix; None when no slot has one."""
        places: dict[int, list[int]] = {}
        for slot in range(n):
            if slots.prefix_row[slot] >= 0:
                places.setdefault(slots.prefix_row[slot], []).append(slot)
        if not places:
            return None
        lengths = [slots.prefix_len[row] if row >= 0 else 0 for row in slots.prefix_row[:n]]
        for slot in range(n):
            if slots.prefix_row[slot] < 0:  # it needs a place too, where all is masked for it
                min(places.values(), key=len).append(slot)
        rows, members = max(places) + 1, max(map(len, places.values()))
        to_rows, to_slots = [0] * (rows * members), [0] * n
        for row, slots_here in places.items():
            for i, slot in enumerate(slots_here):
                to_rows[row * members + i] = slot
                to_slots[slot] = row * members + i
        return cls(
            slots, rows, members, max(lengths), torch.tensor(to_rows), torch.tensor(to_slots), torch.tensor(lengths)
        )

    def bias(self, group: int) -> Tensor | None:
        """[rows, 1, members * G, width], which masks columns past a slot's prefix; None when there are none."""
        if group not in self.biases:
            masked = torch.arange(self.width) >= self.prefix_len[:, None]
            self.biases[group] = self._spread(masked, group) if masked.any() else None
        return self.biases[group]

    def window_bias(self, own_len: Tensor, window: int, group: int) -> Tensor:
        """The same where a slot sees only its newest `window` tokens."""
        columns, length = torch.arange(self.width), self.prefix_len[:, None]
        masked = (columns >= length) | (columns <= length + own_len[:, None] - 1 - window)
        return self._spread(masked, group)

    def _spread(self, masked: Tensor, group: int) -> Tensor:
        places = masked[self.to_rows].view(self.rows, 1, self.members, 1, self.width)
        places = places.expand(-1, -1, -1, group, -1).reshape(self.rows, 1, self.members * group, self.width)
        return score_bias(places, self.slots)

    def _by_row(self, x: Tensor) -> Tensor:
        """[n, KV, G, X] -> [rows, KV, members * G, X]."""
        _, heads, group, width = x.shape
        places = x.index_select(0, self.to_rows).view(self.rows, self.members, heads, group, width)
        return places.transpose(1, 2).reshape(self.rows, heads, self.members * group, width)

    def _by_slot(self, x: Tensor, group: int) -> Tensor:
        """[rows, KV, members * G, ...] -> [n, KV, G, ...]."""
        rows, heads, _, *rest = x.shape
        places = x.view(rows, heads, self.members, group, *rest).transpose(1, 2)
        return places.reshape(rows * self.members, heads, group, *rest).index_select(0, self.to_slots)

    def attend(
        self, layer: int, q: Tensor, bias: Tensor | None, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """q [n, KV, G, D] over the slots' prefixes: [n, KV, G, D] and its log-sum-exp [n, KV, G]."""
        prefix, group = self.slots.prefix, q.shape[2]
        keys, values = (store[layer, : self.rows, :, : self.width] for store in (prefix.keys, prefix.values))
        out, total = attend_part(self._by_row(q), keys, values, bias, scale, softcap)
        return self._by_slot(out, group), self._by_slot(total, group)


@dataclass(slots=True)
class PrefillChunk:
    """Several tokens of one slot: `first`..`first + count` of the step's tokens."""

    slots: KVSlots
    slot: int
    first: int
    count: int
    own_len: int  # with the new tokens
    biases: dict[int | None, Tensor] = field(default_factory=dict)  # by window

    def bias(self, window: int | None) -> Tensor:
        """[1, 1, count, prefix + own], which masks columns that a token must not see."""
        if window not in self.biases:
            length = self.slots.base[self.slot] + self.own_len
            columns, rows = torch.arange(length), torch.arange(length - self.count, length)[:, None]
            masked = columns > rows
            if window is not None:
                masked |= columns <= rows - window
            self.biases[window] = score_bias(masked, self.slots)[None, None]
        return self.biases[window]

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [count, KV, G, D] -> [count, KV, G, D]."""
        own, row, base = self.slots.own, self.slots.prefix_row[self.slot], self.slots.base[self.slot]
        q = q.permute(2, 1, 0, 3)  # a KV head's queries as a batch, so that its keys are read in place

        def part(store: Tensor, row: int, length: int) -> Tensor:
            return store[layer, row, :, :length].expand(q.shape[0], -1, -1, -1)

        causal = window is None and self.own_len == self.count
        bias = None if causal else self.bias(window)[..., base:]
        keys, values = (part(store, self.slot, self.own_len) for store in (own.keys, own.values))
        out, total = attend_part(q, keys, values, bias, scale, softcap, causal)
        if row >= 0:
            keys, values = (part(store, row, base) for store in (self.slots.prefix.keys, self.slots.prefix.values))
            bias = None if window is None else self.bias(window)[..., :base]
            out = merge_parts(out, total, *attend_part(q, keys, values, bias, scale, softcap))
        return out.permute(2, 1, 0, 3)


def score_bias(masked: Tensor, slots: KVSlots) -> Tensor:
    """What is added to scores: 0, and `masked_score` where masked."""
    dtype = slots.own.keys.dtype
    return torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, masked_score(dtype))


@dataclass(slots=True)
class SlotPlan:
    """One step over slots: where the new KV is written, and who attends to what."""

    slots: KVSlots
    targets: Tensor  # [N * KV], rows of the flattened own buffer
    decode: DecodeRows | None
    prefills: list[PrefillChunk]

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        own, (tokens, heads) = self.slots.own, (k.shape[2], k.shape[1])
        for store, new in ((own.keys, k), (own.values, v)):
            rows = new[0].transpose(0, 1).reshape(tokens * heads, -1)
            store[layer].view(-1, rows.shape[1]).index_copy_(0, self.targets, rows)
        q = q[0].transpose(0, 1).view(tokens, heads, -1, q.shape[-1])  # [N, KV, G, D]
        parts = []
        if self.decode is not None:
            singles = q[: len(self.decode.own_len)]
            parts.append(self.decode.attend(layer, singles, scale, window, softcap))
        for chunk in self.prefills:
            parts.append(chunk.attend(layer, q[chunk.first : chunk.first + chunk.count], scale, window, softcap))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1, 2)[None]
