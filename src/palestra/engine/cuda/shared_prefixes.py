"""Which rows of a decode step begin with the same pages, so that these are read once for several rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from palestra.engine.session import Session

BLOCK_ROWS = 8  # rows that read a prefix together
MIN_SAVED_BYTES = 96 << 20  # of a layer's KV: to read them, mostly from the L2 cache, takes longer than a kernel more


class SharedPrefixes(NamedTuple):
    """On the device: how many leading tokens each row reads together with others, and who they are."""

    tokens: Tensor  # [rows], whole pages; 0: it reads all its pages by itself
    blocks: Tensor  # [blocks, BLOCK_ROWS] rows with the same prefix; -1: nobody


class SharedArrays(NamedTuple):
    """The same on the host, as int32."""

    tokens: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of(cls, sessions: Sequence[Session], page_size: int, min_tokens: float) -> SharedArrays | None:
        """None where fewer than `min_tokens` would be read less.

        A page is shared together with all pages before it. So rows with the same last shared page share them all.
        """
        lengths = [session.shared_len // page_size for session in sessions]
        if sum(lengths) * page_size < min_tokens:
            return None
        rows_of = defaultdict[int, list[int]](list)
        for row, (session, pages) in enumerate(zip(sessions, lengths, strict=True)):
            if pages:
                rows_of[session.table[pages - 1]].append(row)
        parts = (rows[i : i + BLOCK_ROWS] for rows in rows_of.values() for i in range(0, len(rows), BLOCK_ROWS))
        blocks = [part for part in parts if len(part) > 1]
        saved = sum((len(block) - 1) * lengths[block[0]] for block in blocks) * page_size
        if not blocks or saved < min_tokens:
            return None
        tokens = np.zeros(len(sessions), np.int32)
        padded = np.full((len(blocks), BLOCK_ROWS), -1, np.int32)
        for place, block in enumerate(blocks):
            padded[place, : len(block)] = block
            tokens[block] = lengths[block[0]] * page_size
        return cls(tokens, padded)
