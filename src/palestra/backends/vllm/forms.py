"""vLLM's forms: how it is asked to sample, what it answers, and whether its numbers are the learner's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from palestra.core.errors import PalestraError, RolloutError
from palestra.core.types import Finish, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.policy.token_logprobs import token_logprobs

PROBE_TEXT = 'What do 3 red lamps cost? Ask, look it up: {"name": "price"} — then compute 12 + 7.\n'
PROBE_TOKENS = 16
MAX_MEAN_GAP = 0.25  # nats; float32 agrees to 1e-5, bfloat16 to a few hundredths, other weights by whole nats


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """By the names of vLLM's SamplingParams. Only our stop tokens end a turn, not those of the model's own config."""
    if params.grammar is not None:
        raise PalestraError("vLLM samples without our grammars; leave rollout.constrain_tool_calls out")
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


def check_agreement(
    turn: Turn, prompt_ids: Sequence[int], weights: Weights, temperature: float, who: str, remedy: str
) -> float:
    """The mean gap between the sampler's logprobs of a turn and those of the learner's module; PalestraError where
    they are not of the same model. 0 where the module is in another process: training measures it then."""
    if weights.module is None:
        return 0.0
    ids = [*prompt_ids, *turn.token_ids.tolist()]
    pieces = token_logprobs(weights.module, ids, len(prompt_ids), temperature=temperature)
    own = [value for piece in pieces for value in piece.logprobs]
    gap = float(np.abs(np.asarray(own) - turn.logprobs).mean())
    if not gap <= MAX_MEAN_GAP:  # NaN, too
        raise PalestraError(
            f"{who} gives other log-probabilities than the learner: {gap:.3g} nats a token apart after version "
            f"{weights.version} of the weights was loaded, expected at most {MAX_MEAN_GAP}. {remedy}"
        )
    return gap
