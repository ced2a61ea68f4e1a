"""One CPU step seen by attention: where the new KV goes, and which lanes look at what."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from palestra.engine.attention import attend_part, hidden_value, merge_parts
from palestra.engine.cpu.kv_slots import Lanes


@dataclass(slots=True)
class Decode:
    """Lanes 0..n-1, one token each, attended in one go."""

    lanes: Lanes
    own_len: list[int]  # by lane, the new token included
    width: int
    groups: Groups | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    prefix_masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[n, 1, 1, own width], what hides columns that a lane must not see; None when it may see all."""
        if window not in self.masks:
            self.masks[window] = None
            if min(self.own_len) < self.width or (window is not None and self.width > window):
                columns, last = torch.arange(self.width), torch.tensor(self.own_len)[:, None] - 1
                hidden = columns > last
                if window is not None:
                    hidden |= columns <= last - window
                self.masks[window] = hiding(hidden, self.lanes)[:, None, None]
        return self.masks[window]

    def prefix_mask(self, groups: Groups, window: int | None, group: int) -> Tensor | None:
        if window is None:
            return groups.mask(group)
        if window not in self.prefix_masks:
            self.prefix_masks[window] = groups.window_mask(torch.tensor(self.own_len), window, group)
        return self.prefix_masks[window]

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [n, KV, G, D] -> [n, KV, G, D]."""
        own, n = self.lanes.own, q.shape[0]
        keys, values = own.keys[layer, :n, :, : self.width], own.values[layer, :n, :, : self.width]
        out, total = attend_part(q, keys, values, self.mask(window), scale, softcap)
        if self.groups is None:
            return out
        prefix_mask = self.prefix_mask(self.groups, window, q.shape[2])
        return merge_parts(out, total, *self.groups.attend(layer, q, prefix_mask, scale, softcap))


@dataclass(slots=True)
class Groups:
    """Which lanes share which prefix slot, so that a slot is read once for all of them.

    `to_slots` [slots * members] picks the lane of each place (padding repeats lane 0);
    `to_lanes` [n] picks the place of each lane.
    """

    lanes: Lanes
    slots: int
    members: int
    width: int
    to_slots: Tensor
    to_lanes: Tensor
    prefix_len: Tensor  # [n], 0 for a lane without a prefix
    masks: dict[int, Tensor | None] = field(default_factory=dict)  # by query heads a KV head

    @classmethod
    def of(cls, lanes: Lanes, n: int) -> Groups | None:
        """The first n lanes by prefix; None when no lane has one."""
        places: dict[int, list[int]] = {}
        for lane in range(n):
            if lanes.slot[lane] >= 0:
                places.setdefault(lanes.slot[lane], []).append(lane)
        if not places:
            return None
        lengths = [lanes.prefix_len[slot] if slot >= 0 else 0 for slot in lanes.slot[:n]]
        for lane in range(n):
            if lanes.slot[lane] < 0:  # it needs a place too, where all is hidden from it
                min(places.values(), key=len).append(lane)
        slots, members = max(places) + 1, max(map(len, places.values()))
        to_slots, to_lanes = [0] * (slots * members), [0] * n
        for slot, lanes_here in places.items():
            for i, lane in enumerate(lanes_here):
                to_slots[slot * members + i] = lane
                to_lanes[lane] = slot * members + i
        return cls(
            lanes, slots, members, max(lengths), torch.tensor(to_slots), torch.tensor(to_lanes), torch.tensor(lengths)
        )

    def mask(self, group: int) -> Tensor | None:
        """[slots, 1, members * G, width], what hides columns past a lane's prefix; None when nothing does."""
        if group not in self.masks:
            hidden = torch.arange(self.width) >= self.prefix_len[:, None]
            self.masks[group] = self._spread(hidden, group) if hidden.any() else None
        return self.masks[group]

    def window_mask(self, own_len: Tensor, window: int, group: int) -> Tensor:
        """The same where a lane sees only its newest `window` tokens."""
        columns, length = torch.arange(self.width), self.prefix_len[:, None]
        hidden = (columns >= length) | (columns <= length + own_len[:, None] - 1 - window)
        return self._spread(hidden, group)

    def _spread(self, hidden: Tensor, group: int) -> Tensor:
        places = hidden[self.to_slots].view(self.slots, 1, self.members, 1, self.width)
        places = places.expand(-1, -1, -1, group, -1).reshape(self.slots, 1, self.members * group, self.width)
        return hiding(places, self.lanes)

    def _by_slot(self, rows: Tensor) -> Tensor:
        """[n, KV, G, X] -> [slots, KV, members * G, X]."""
        _, heads, group, x = rows.shape
        places = rows.index_select(0, self.to_slots).view(self.slots, self.members, heads, group, x)
        return places.transpose(1, 2).reshape(self.slots, heads, self.members * group, x)

    def _by_lane(self, rows: Tensor, group: int) -> Tensor:
        """[slots, KV, members * G, ...] -> [n, KV, G, ...]."""
        slots, heads, _, *rest = rows.shape
        places = rows.view(slots, heads, self.members, group, *rest).transpose(1, 2)
        return places.reshape(slots * self.members, heads, group, *rest).index_select(0, self.to_lanes)

    def attend(
        self, layer: int, q: Tensor, mask: Tensor | None, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """q [n, KV, G, D] over the lanes' prefixes: [n, KV, G, D] and its log-sum-exp [n, KV, G]."""
        prefix, group = self.lanes.prefix, q.shape[2]
        keys, values = (store[layer, : self.slots, :, : self.width] for store in (prefix.keys, prefix.values))
        out, total = attend_part(self._by_slot(q), keys, values, mask, scale, softcap)
        return self._by_lane(out, group), self._by_lane(total, group)


@dataclass(slots=True)
class Feed:
    """One lane that is fed several tokens: `first`..`first + count` of the step's tokens."""

    lanes: Lanes
    lane: int
    first: int
    count: int
    own_len: int  # with the new tokens
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[1, 1, count, prefix + own], what hides columns that a token must not see."""
        if window not in self.masks:
            length = self.lanes.base[self.lane] + self.own_len
            columns, rows = torch.arange(length), torch.arange(length - self.count, length)[:, None]
            hidden = columns > rows
            if window is not None:
                hidden |= columns <= rows - window
            self.masks[window] = hiding(hidden, self.lanes)[None, None]
        return self.masks[window]

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [count, KV, G, D] -> [count, KV, G, D]."""
        own, slot, base = self.lanes.own, self.lanes.slot[self.lane], self.lanes.base[self.lane]
        q = q.permute(2, 1, 0, 3)  # a KV head's queries as a batch, so that its keys are read in place

        def part(store: Tensor, row: int, length: int) -> Tensor:
            return store[layer, row, :, :length].expand(q.shape[0], -1, -1, -1)

        causal = window is None and self.own_len == self.count
        hidden = None if causal else self.mask(window)[..., base:]
        keys, values = (part(store, self.lane, self.own_len) for store in (own.keys, own.values))
        out, total = attend_part(q, keys, values, hidden, scale, softcap, causal)
        if slot >= 0:
            keys, values = (part(store, slot, base) for store in (self.lanes.prefix.keys, self.lanes.prefix.values))
            hidden = None if window is None else self.mask(window)[..., :base]
            out = merge_parts(out, total, *attend_part(q, keys, values, hidden, scale, softcap))
        return out.permute(2, 1, 0, 3)


def hiding(hidden: Tensor, lanes: Lanes) -> Tensor:
    """What is added to scores: 0, and `hidden_value` where hidden."""
    dtype = lanes.own.keys.dtype
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, hidden_value(dtype))


@dataclass(slots=True)
class LanePlan:
    """One step over lanes: where the new KV is written, and who attends to what."""

    lanes: Lanes
    targets: Tensor  # [N * KV], rows of the flattened own slab
    decode: Decode | None
    feeds: list[Feed]

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
        own, (tokens, heads) = self.lanes.own, (k.shape[2], k.shape[1])
        for store, new in ((own.keys, k), (own.values, v)):
            rows = new[0].transpose(0, 1).reshape(tokens * heads, -1)
            store[layer].view(-1, rows.shape[1]).index_copy_(0, self.targets, rows)
        q = q[0].transpose(0, 1).view(tokens, heads, -1, q.shape[-1])  # [N, KV, G, D]
        parts = []
        if self.decode is not None:
            singles = q[: len(self.decode.own_len)]
            parts.append(self.decode.attend(layer, singles, scale, window, softcap))
        for feed in self.feeds:
            parts.append(feed.attend(layer, q[feed.first : feed.first + feed.count], scale, window, softcap))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1, 2)[None]
