"""LoRA with vLLM: every version of the adapter is another adapter there, with a name and a folder of its own.

vLLM's prefix cache goes by the adapter's name, so no version ever reads what another has computed, and a request keeps
the adapter that it began with: all tokens of a turn are of one version.
"""

from __future__ import annotations

import itertools
import shutil
import uuid
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.core.weights import Weights

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as --max-lora-rank


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str  # of no other adapter, in this run or in another
    number: int  # from 1 on
    folder: Path  # in PEFT's format

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class AdapterFolders:
    """The adapters of the last versions on disk.

    vLLM reads an adapter again where another has taken its slot, and fails as a whole if it is gone. So its files stay
    as long as requests for it may be under way: for `max_staleness` versions, and one more, as a request that was
    given up ends a moment later.
    """

    def __init__(self, parent: Path, max_staleness: int = 0) -> None:
        self._run = f"palestra-{uuid.uuid4().hex[:8]}"
        self._root = parent.resolve() / self._run
        self._kept = max_staleness + 2
        self._numbers = itertools.count(1)
        self._written: deque[Adapter] = deque()
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)

    def write(self, weights: Weights) -> Adapter:
        if not hasattr(weights.module, "peft_config"):
            raise PalestraError("the learner has no LoRA adapter in this process; set lora.r to 0 to train all weights")
        number = next(self._numbers)
        adapter = Adapter(f"{self._run}-{number}-v{weights.version}", number, self._root / str(number))
        adapter.folder.mkdir(parents=True)
        # "auto" would ask the hub for the vocabulary of the base model
        weights.module.save_pretrained(adapter.folder, save_embedding_layers=False)
        # by the umask, as other files: safetensors makes its own private, and the server may be another user's
        shutil.copymode(adapter.folder / "adapter_config.json", adapter.folder / "adapter_model.safetensors")
        self._written.append(adapter)
        return adapter

    def take_outdated(self) -> list[Adapter]:
        """Those that no request can be under way for; the caller deletes them."""
        return [self._written.popleft() for _ in range(len(self._written) - self._kept)]

    def take_all(self) -> list[Adapter]:
        return [self._written.popleft() for _ in range(len(self._written))]


def rank_limit(rank: int) -> int:
    """The least --max-lora-rank of vLLM that is enough.

    >>> rank_limit(20)
    32
    """
    fitting = [limit for limit in MAX_LORA_RANKS if limit >= rank]
    if not fitting:
        raise PalestraError(f"vLLM takes adapters of rank {MAX_LORA_RANKS[-1]} at most, and lora.r is {rank}; lower it")
    return fitting[0]
