"""The policy that samples on a Tinker server what its learner has trained there."""

from __future__ import annotations

import numpy as np
from tinker import types

from palestra.core.errors import PalestraError, RolloutError, UnsupportedError
from palestra.core.types import Finish, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.tinker.client.learner import TinkerWeights
from palestra.extras.tinker.client.model import Sampler, TinkerModel
from palestra.policy.base import BoundedSessions


class TinkerPolicy(BoundedSessions):
    """Samples one version of the model's weights until it is given the next: turns in progress stay at theirs."""

    def __init__(self, model: TinkerModel, context_tokens: int) -> None:
        self.context_tokens = self._context = context_tokens
        self._model = model
        self._sampler: Sampler = model.sampler(0)
        self.version = 0

    def update(self, weights: Weights) -> None:
        if not isinstance(weights, TinkerWeights) or weights.sampler is None:
            raise UnsupportedError(
                "a Tinker server samples the weights that it has trained itself; train with --backend tinker, too"
            )
        self._sampler, self.version = weights.sampler, weights.sampler.version

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        prompt, options, sampler = types.ModelInput.from_ints(ids), sampling_params(params), self._sampler
        try:
            answer = await self._model.call_async(lambda: sampler.client.sample(prompt, 1, options))
        except PalestraError as error:
            raise RolloutError(str(error)) from error
        sequence = answer.sequences[0]
        logprobs = sequence.logprobs
        if logprobs is None or len(logprobs) != len(sequence.tokens) or not sequence.tokens:
            count = None if logprobs is None else len(logprobs)
            raise RolloutError(f"the Tinker server sampled {len(sequence.tokens)} tokens with {count} logprobs")
        finish: Finish = "stop" if sequence.stop_reason == "stop" else "length"
        return Turn("model", np.array(sequence.tokens), np.array(logprobs), sampler.version, finish)  # type: ignore[arg-type]


def sampling_params(params: SamplingParams) -> types.SamplingParams:
    """As the SDK has them; what it does not have is refused."""
    missing = {
        "min_p": params.min_p != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "grammar": params.grammar is not None,
        "stop strings beside stop tokens": bool(params.stop and params.stop_token_ids),
    }
    if refused := [name for name, used in missing.items() if used]:
        raise UnsupportedError(f"a Tinker server cannot sample with {', '.join(refused)}; leave it out")
    stops: list[str] | list[int] = list(params.stop) if params.stop else list(params.stop_token_ids)
    return types.SamplingParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        seed=params.seed,
        stop=stops,  # none at all: also not at the end of the text
    )
