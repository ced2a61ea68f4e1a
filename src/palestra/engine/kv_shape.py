"""The shape of one token's KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from palestra.core.errors import PalestraError


class CacheTooLarge(PalestraError):
    """The GPU has no room for so much KV."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token: layers, heads, key and value width, dtype."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize
