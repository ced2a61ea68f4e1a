"""Rollouts made by a function of the user's, as TRL's `rollout_func`: prompts in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, cast

from palestra.core.errors import PalestraError
from palestra.core.messages import to_dict
from palestra.core.types import Group, Problem, Rollout, Turn
from palestra.envs.base import Episode
from palestra.rollout.collect import Collector
from palestra.rollout.run import from_outside

# (prompts, trainer) -> {"prompt_ids": …, "completion_ids": …, "logprobs": …, further columns}, one entry a prompt
RolloutFunction = Callable[[list[list[dict[str, Any]]], Any], Mapping[str, Sequence[Any]]]

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class CustomCollector(Collector):
    """A collector whose rollouts come from a function; scores and rewards are as always."""

    function: RolloutFunction = field(kw_only=True)
    trainer: Any = field(default=None, kw_only=True)

    @classmethod
    def of(cls, collector: Collector, function: RolloutFunction, trainer: Any) -> CustomCollector:
        if collector.limits.grammars is not None:
            raise PalestraError("rollout.constrain_tool_calls has no effect on a rollout_func; set it to false")
        parts = {part.name: getattr(collector, part.name) for part in fields(Collector)}
        return cls(**parts, function=function, trainer=trainer)

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_key: str,
        on_rollout: Callable[[Rollout], None] = lambda r: None,
    ) -> list[Group]:
        """One group for each problem, from one call of the function with every prompt `group_size` times."""
        episodes = [self.environment.open(problem) for problem in problems for _ in range(group_size)]
        prompts = [[to_dict(message) for message in episode.prompt] for episode in episodes]
        output = await asyncio.to_thread(self.function, prompts, self.trainer)
        columns = _checked(output, len(prompts))
        groups = []
        for g, problem in enumerate(problems):
            mine = range(g * group_size, (g + 1) * group_size)
            rollouts = [await self._rollout(problem, episodes[i], columns, i) for i in mine]
            for rollout in rollouts:
                on_rollout(rollout)
            extra = {k: [v[i] for i in mine] for k, v in columns.items() if k not in (*_NEEDED, "env_mask")}
            groups.append(Group(problem.id, tuple(self._reward(problem, rollouts, [episodes[i] for i in mine], extra))))
        return groups

    async def _rollout(
        self, problem: Problem, episode: Episode, columns: Mapping[str, Sequence[Any]], i: int
    ) -> Rollout:
        completion = tuple(columns["completion_ids"][i])
        mask = columns["env_mask"][i] if "env_mask" in columns else [1] * len(completion)
        turns = (
            Turn("template", tuple(columns["prompt_ids"][i])),
            *_turns(completion, columns["logprobs"][i], mask, self.policy.version),
        )
        messages = (*episode.prompt, self.chat.read(completion))
        scores, error = {}, None
        try:
            scores = dict(await from_outside("scoring", episode.score(messages, ())))
        except PalestraError as failure:
            error = str(failure)
        finally:
            episode.close()
        return Rollout(problem.id, turns, messages, "failed" if error else "answered", scores=scores, error=error)


def _turns(ids: Sequence[int], logprobs: Sequence[Any], mask: Sequence[int], version: int) -> list[Turn]:
    """Stretches of tokens that the model (mask 1) or the environment (mask 0) made."""
    if not len(ids) == len(logprobs) == len(mask):
        raise PalestraError(
            f"rollout_func gave {len(ids)} completion_ids with {len(logprobs)} logprobs and a mask of {len(mask)}; "
            "give one of each a token"
        )
    values = [float(p[0]) if isinstance(p, Sequence) else float(p) for p in logprobs]  # TRL may nest them, best first
    turns = []
    for by_model, stretch in groupby(range(len(ids)), key=lambda i: bool(mask[i])):
        at = list(stretch)
        tokens = tuple(int(ids[i]) for i in at)
        if by_model:
            turns.append(Turn("model", tokens, tuple(values[i] for i in at), version))
        else:
            turns.append(Turn("environment", tokens))
    return turns


def _checked(output: Any, count: int) -> Mapping[str, Sequence[Any]]:
    missing = [key for key in _NEEDED if not isinstance(output, Mapping) or key not in output]
    if missing:
        raise PalestraError(f"rollout_func gave no {', '.join(missing)}; expected a dict with {', '.join(_NEEDED)}")
    wrong = {key: len(values) for key, values in output.items() if len(values) != count}
    if wrong:
        raise PalestraError(
            f"rollout_func was given {count} prompts, and its columns have {wrong}; give one entry each"
        )
    return cast(Mapping[str, Sequence[Any]], output)
