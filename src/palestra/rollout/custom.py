"""Rollouts made by a function of the user's, as TRL's `rollout_func`: prompts in, token ids and logprobs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from palestra.core.calls import call_user_code, in_lane
from palestra.core.errors import PalestraError, RolloutError, UserCodeError
from palestra.core.messages import to_dict
from palestra.core.types import Rollout, StopReason, Turn
from palestra.models.chat.template import ChatFormat
from palestra.policy.base import Policy
from palestra.rollout.agent_loop import wrap_user_error
from palestra.rollout.collect import Runner, Started

# (prompts, trainer) -> {"prompt_ids": …, "completion_ids": …, "logprobs": …, further columns}, one entry a prompt.
# Optional columns are "env_mask" (0 where the environment made a token) and "truncated" (true where an answer was cut
# off); all others go to the reward functions.
RolloutFunction = Callable[[list[list[dict[str, Any]]], Any], Mapping[str, Sequence[Any]]]

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class FunctionRunner(Runner):
    """Rollouts by a user-supplied `rollout_func`. It samples by its own rule, so the seed keys are not used."""

    function: RolloutFunction
    trainer: Any
    chat: ChatFormat
    policy: Policy[Any]
    in_batches = True

    async def begin(self, groups: Sequence[Started]) -> None:
        """Call the function with the prompts of all siblings.

        If it raises, each problem gets a call of its own, so that only some need fail.
        """
        try:
            await self._call(groups)
        except PalestraError as error:
            for group in groups:
                if isinstance(error, RolloutError) and len(groups) > 1:
                    await self.begin([group])
                else:
                    group.error = str(error)

    async def _call(self, groups: Sequence[Started]) -> None:
        """Give each group its part of the columns."""
        prompts = [[to_dict(message) for message in e.prompt] for group in groups for e in group.episodes]
        if not prompts:
            return
        call = call_user_code("rollout_func", self.function, prompts, self.trainer, limit_s=math.inf)
        columns: Mapping[str, Sequence[Any]] = await call
        if missing := [key for key in _NEEDED if not isinstance(columns, Mapping) or key not in columns]:
            raise UserCodeError(f"rollout_func gave no {', '.join(missing)}; expected a dict with {', '.join(_NEEDED)}")
        if wrong := {key: len(values) for key, values in columns.items() if len(values) != len(prompts)}:
            raise UserCodeError(
                f"rollout_func got {len(prompts)} prompts, and its columns have {wrong} entries; return one for each "
                "prompt"
            )
        end = 0
        for group in groups:
            mine = slice(end, end := end + len(group.episodes))
            group.state = {key: values[mine] for key, values in columns.items()}
            group.columns = {k: v for k, v in group.state.items() if k not in (*_NEEDED, "env_mask")}

    async def attempt(self, group: Started, i: int, seed_key: str) -> Rollout:
        episode, columns = group.episodes[i], {key: values[i] for key, values in group.state.items()}
        completion = list(columns["completion_ids"])
        stop: StopReason = "truncated" if columns.get("truncated") else "answered"
        turns, messages = [Turn("template", columns["prompt_ids"])], (*episode.prompt, self.chat.read(completion))
        scores, error = {}, None
        try:
            mask = columns.get("env_mask", [1] * len(completion))
            turns += _turns(completion, columns["logprobs"], mask, self.policy.version)
            with in_lane(getattr(episode, "lane", None)):
                scores = dict(await wrap_user_error("scoring", episode.score(messages, ())))
        except PalestraError as failure:
            stop, error = "failed", str(failure)
        return Rollout(group.problem.id, tuple(turns), messages, stop, scores=scores, error=error)


def _turns(ids: Sequence[int], logprobs: Sequence[Any], mask: Sequence[int], version: int) -> list[Turn]:
    """Runs of tokens that the model (mask 1) or the environment (mask 0) made."""
    if not len(ids) == len(logprobs) == len(mask):
        raise UserCodeError(
            f"rollout_func gave {len(ids)} completion_ids with {len(logprobs)} logprobs and a mask of {len(mask)}; "
            "return one of each for every token"
        )
    values = [float(p[0]) if isinstance(p, Sequence) else float(p) for p in logprobs]  # TRL may nest them, best first
    turns = []
    for by_model, run in groupby(range(len(ids)), key=lambda i: bool(mask[i])):
        at = list(run)
        part = slice(at[0], at[-1] + 1)
        if by_model:
            turns.append(Turn("model", ids[part], values[part], version))  # type: ignore[arg-type]
        else:
            turns.append(Turn("environment", ids[part]))  # type: ignore[arg-type]
    return turns
