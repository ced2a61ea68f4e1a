"""Shared by both vLLM policies: request fields, adapter folders, and the check of vLLM's log-probabilities.

Every version of a LoRA adapter is another adapter in vLLM, with its own name and folder. vLLM's prefix cache is keyed
by the adapter's name, so no version reads another's KV, and a request keeps the adapter that it started with: all
tokens of a turn have one version.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from palestra.core.errors import RolloutError, ServiceError, SettingError, UnsupportedError
from palestra.core.types import Finish, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.policy.base import BoundedSessions
from palestra.policy.local import token_logprobs

log = logging.getLogger("palestra")
PROBE_TEXT = 'What do 3 red lamps cost? Ask, look it up: {"name": "price"} — then compute 12 + 7.\n'
PROBE_TOKENS = 16
MAX_MEAN_GAP = 0.25  # nats; float32 agrees to 1e-5, bfloat16 to a few hundredths, other weights by whole nats


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """By the names of vLLM's SamplingParams. Only our stop tokens end a turn, not those of the model's own config."""
    if params.grammar is not None:
        raise UnsupportedError("vLLM samples without our grammars; leave rollout.constrain_tool_calls out")
    return {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,  # 0 is all
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "seed": params.seed,
        "logprobs": 0,  # of the sampled token alone
    }


def turn_of(token_ids: Sequence[int], logprobs: Sequence[float], version: int, finish: str | None) -> Turn:
    """`version` is that at the request: a turn that new weights have overtaken counts as older than its last tokens
    are, and its logprobs are what its tokens were sampled with in any case."""
    if finish not in ("stop", "length") or not len(token_ids) or len(token_ids) != len(logprobs):
        raise RolloutError(
            f"vLLM ended a turn with {finish!r} after {len(token_ids)} tokens with {len(logprobs)} logprobs; "
            "expected stop or length, and one for each"
        )
    return Turn("model", token_ids, logprobs, version, cast(Finish, finish))  # type: ignore[arg-type]


class VllmPolicy(BoundedSessions):
    """What both policies share: each version of the weights is checked by the logprobs of a few tokens.

    `temperature` is the one of training: the logprobs are compared at it. Subclasses add `_load` and `_probe`.
    """

    _who: str  # in errors
    _remedy: str

    def __init__(self, tokenizer: Any, temperature: float) -> None:
        self.version = 0
        self._temperature = temperature
        self._probe_ids = [int(i) for i in tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids]

    def update(self, weights: Weights) -> None:
        """Load these weights, and compare the logprobs of a few tokens with those of the learner's module.

        Where the module is in another process, training measures the gap.
        """
        self._load(weights)
        self.version = weights.version
        turn = self._probe(SamplingParams(PROBE_TOKENS, temperature=self._temperature, seed=weights.version))
        if turn is None or weights.module is None:
            return
        ids = [*self._probe_ids, *turn.token_ids.tolist()]
        pieces = token_logprobs(weights.module, ids, len(self._probe_ids), temperature=self._temperature)
        own = [value for piece in pieces for value in piece.logprobs]
        gap = float(np.abs(np.asarray(own) - turn.logprobs).mean())
        if not gap <= MAX_MEAN_GAP:  # NaN, too
            raise ServiceError(
                f"{self._who} gives other log-probabilities than the learner: {gap:.3g} nats a token apart after "
                f"version {weights.version} of the weights was loaded, expected at most {MAX_MEAN_GAP}. {self._remedy}"
            )
        log.info("vLLM samples version %d; mean gap of logprobs on the probe %.2g", weights.version, gap)

    def _load(self, weights: Weights) -> None:
        raise NotImplementedError

    def _probe(self, params: SamplingParams) -> Turn | None:
        """Sample after the probe text; None where that is not possible now."""
        raise NotImplementedError


MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as --max-lora-rank


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str  # of no other adapter, in this run or in another
    number: int  # from 1 on
    folder: Path  # in PEFT's format


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
            raise SettingError("the learner has no LoRA adapter in this process; set lora.r to 0 to train all weights")
        number = next(self._numbers)
        adapter = Adapter(f"{self._run}-{number}-v{weights.version}", number, self._root / str(number))
        adapter.folder.mkdir(parents=True)
        # "auto" would ask the hub for the vocabulary of the base model
        weights.module.save_pretrained(adapter.folder, save_embedding_layers=False)
        # by the umask, as other files: safetensors makes its own private, and the server may be another user's
        shutil.copymode(adapter.folder / "adapter_config.json", adapter.folder / "adapter_model.safetensors")
        self._written.append(adapter)
        return adapter

    def delete(self, unload: Callable[[Adapter], bool] = lambda adapter: True, keep: int | None = None) -> None:
        """Delete all but the last `keep`; by default, those that no request can be under way for.

        `unload` is called before, and returns False if the server is gone.
        """
        while len(self._written) > (self._kept if keep is None else keep):
            adapter = self._written.popleft()
            if not unload(adapter):
                return
            shutil.rmtree(adapter.folder, ignore_errors=True)


def rank_limit(rank: int) -> int:
    """The least --max-lora-rank of vLLM that is enough.

    >>> rank_limit(20)
    32
    """
    fitting = [limit for limit in MAX_LORA_RANKS if limit >= rank]
    if not fitting:
        raise UnsupportedError(f"vLLM takes adapters of rank {MAX_LORA_RANKS[-1]} at most, and lora.r is {rank}")
    return fitting[0]
