"""One CPU step seen by attention: where the new KV goes, and which lanes look at what."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from palestra.engine.attention import attend_rows
from palestra.engine.lanes import Lanes

HIDDEN = float("-inf")


@dataclass(slots=True)
class Decode:
    """Lanes 0..n-1, one token each, attended in one go."""

    lanes: Lanes
    own_len: Tensor  # [n], the new token included
    width: int
    groups: Groups | None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, 1, prefix width + own width], minus infinity where a lane must not look."""
        if window not in self.masks:
            columns = torch.arange(self.width)
            last = self.own_len[:, None] - 1
            hidden = columns > last
            if window is not None:
                hidden |= columns <= last - window
            if self.groups is not None:
                hidden = torch.cat([self.groups.hidden(last, window), hidden], dim=1)
            mask = torch.zeros(hidden.shape, dtype=self.lanes.own.keys.dtype).masked_fill_(hidden, HIDDEN)
            self.masks[window] = mask[:, None, None]
        return self.masks[window]

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [n, KV, G, D] -> [n, KV, G, D]."""
        own, n = self.lanes.own, q.shape[0]
        keys, values = own.keys[layer, :n, :, : self.width], own.values[layer, :n, :, : self.width]
        q = q * scale
        scores = torch.matmul(q, keys.transpose(-1, -2))
        if self.groups is not None:
            scores = torch.cat([self.groups.scores(layer, q), scores], dim=-1)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        weights = scores.add_(self.mask(window)).softmax(-1)
        if self.groups is None:
            return torch.matmul(weights, values)
        out = torch.matmul(weights[..., self.groups.width :], values)
        return out.add_(self.groups.mix(layer, weights[..., : self.groups.width]))


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

    def hidden(self, last: Tensor, window: int | None) -> Tensor:
        """[n, width], true where a lane must not look; `last` [n, 1] is its newest column in its own part."""
        columns, length = torch.arange(self.width), self.prefix_len[:, None]
        hidden = columns >= length
        return hidden if window is None else hidden | (columns <= length + last - window)

    def _by_slot(self, rows: Tensor) -> Tensor:
        """[n, KV, G, X] -> [slots, KV, members * G, X]."""
        _, heads, group, x = rows.shape
        places = rows.index_select(0, self.to_slots).view(self.slots, self.members, heads, group, x)
        return places.transpose(1, 2).reshape(self.slots, heads, self.members * group, x)

    def _by_lane(self, rows: Tensor, group: int) -> Tensor:
        """[slots, KV, members * G, X] -> [n, KV, G, X]."""
        slots, heads, _, x = rows.shape
        places = rows.view(slots, heads, self.members, group, x).transpose(1, 2)
        return places.reshape(slots * self.members, heads, group, x).index_select(0, self.to_lanes)

    def scores(self, layer: int, q: Tensor) -> Tensor:
        keys = self.lanes.prefix.keys[layer, : self.slots, :, : self.width]
        return self._by_lane(torch.matmul(self._by_slot(q), keys.transpose(-1, -2)), q.shape[2])

    def mix(self, layer: int, weights: Tensor) -> Tensor:
        values = self.lanes.prefix.values[layer, : self.slots, :, : self.width]
        return self._by_lane(torch.matmul(self._by_slot(weights), values), weights.shape[2])


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
        """[count, prefix + own], minus infinity where a token must not look."""
        if window not in self.masks:
            length = self.lanes.base[self.lane] + self.own_len
            columns, rows = torch.arange(length), torch.arange(length - self.count, length)[:, None]
            hidden = columns > rows
            if window is not None:
                hidden |= columns <= rows - window
            dtype = self.lanes.own.keys.dtype
            self.masks[window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, HIDDEN)
        return self.masks[window]

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [count, KV, G, D] -> [count, KV, G, D]."""
        own, slot = self.lanes.own, self.lanes.slot[self.lane]
        keys, values = (store[layer, self.lane, :, : self.own_len] for store in (own.keys, own.values))
        if slot >= 0:
            prefix, length = self.lanes.prefix, self.lanes.prefix_len[slot]
            keys = torch.cat([prefix.keys[layer, slot, :, :length], keys], dim=1)
            values = torch.cat([prefix.values[layer, slot, :, :length], values], dim=1)
        return attend_rows(q.permute(1, 2, 0, 3), keys, values, self.mask(window), scale, softcap)


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
        q = q[0].transpose(0, 1).unflatten(1, (heads, -1))  # [N, KV, G, D]
        parts = []
        if self.decode is not None:
            singles = q[: self.decode.own_len.shape[0]]
            parts.append(self.decode.attend(layer, singles, scale, window, softcap))
        for feed in self.feeds:
            parts.append(feed.attend(layer, q[feed.first : feed.first + feed.count], scale, window, softcap))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1, 2)[None]
