"""Rollouts made by a function of the user's, as TRL's `rollout_func`: prompts in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from palestra.core.calls import OutOfThreads
from palestra.core.chat_model import hosting, logging_calls
from palestra.core.errors import PalestraError, RolloutError, UserCodeError
from palestra.core.messages import to_dict
from palestra.core.types import Group, Problem, Rollout, StopReason, Turn
from palestra.envs.base import Environment, Episode
from palestra.envs.running import NotOpened, Opener, close_episodes
from palestra.models.chat.template import ChatFormat
from palestra.policy.base import Policy
from palestra.rollout.agent_loop import wrap_user_error
from palestra.rollout.collect import OnRollout, failed_group, scored_together, with_call_metrics
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import RewardFunctions

# (prompts, trainer) -> {"prompt_ids": …, "completion_ids": …, "logprobs": …, further columns}, one entry a prompt.
# Optional columns are "env_mask" (0 where the environment made a token) and "truncated" (true where an answer was cut
# off); all others go to the reward functions.
RolloutFunction = Callable[[list[list[dict[str, Any]]], Any], Mapping[str, Sequence[Any]]]

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class FunctionCollector:
    """A collector that delegates generation to a user-supplied `rollout_func`."""

    environment: Environment
    function: RolloutFunction
    trainer: Any
    chat: ChatFormat
    policy: Policy[Any]
    rewards: RewardFunctions = field(default_factory=RewardFunctions)
    max_open_episodes: int = 1024

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
    ) -> list[Group]:
        """One group for each problem; the function is called with every prompt `group_size` times.

        There is one call, or several where more episodes are needed than may be open. The function samples by its
        own rule, so the seed keys are not used.
        """
        at_once = self.groups_at_once(group_size)
        groups: list[Group] = []
        for start in range(0, len(problems), at_once):
            groups += await self._call(problems[start : start + at_once], group_size, on_rollout)
        self.rewards.require_working()
        return groups

    def groups_at_once(self, group_size: int) -> int:
        return max(1, self.max_open_episodes // group_size)

    async def _call(self, problems: Sequence[Problem], group_size: int, on_rollout: OnRollout) -> list[Group]:
        """The groups of one call. If it raises, each problem gets a call of its own, so that only some need fail."""
        opener = Opener(self.environment)
        rows = await asyncio.gather(*(opener.open(p, group_size) for p in problems))
        failure: PalestraError | None = None
        opened = [(p, row) for p, row in zip(problems, rows, strict=True) if not isinstance(row, NotOpened)]
        try:
            played = await self._play(opened)
            for group in played:
                for rollout in group.rollouts:
                    on_rollout(rollout)
        except OutOfThreads as error:
            raise UserCodeError(str(error)) from error
        except PalestraError as error:
            failure = error
        finally:
            await close_episodes([episode for _, row in opened for episode in row])
        if isinstance(failure, RolloutError) and len(opened) > 1:
            played = [g for p, _ in opened for g in await self._call([p], group_size, on_rollout)]
        elif failure is not None:
            played = [failed_group(problem, str(failure), group_size, on_rollout) for problem, _ in opened]
        done = iter(played)
        return [
            failed_group(p, row.reason, group_size, on_rollout) if isinstance(row, NotOpened) else next(done)
            for p, row in zip(problems, rows, strict=True)
        ]

    async def _play(self, opened: Sequence[tuple[Problem, Sequence[Episode]]]) -> list[Group]:
        attempts = [(problem, episode) for problem, row in opened for episode in row]
        prompts = [[to_dict(message) for message in episode.prompt] for _, episode in attempts]
        if not prompts:
            return []
        call = asyncio.to_thread(self.function, prompts, self.trainer)
        columns: Mapping[str, Sequence[Any]] = await wrap_user_error("rollout_func", call)
        if missing := [key for key in _NEEDED if not isinstance(columns, Mapping) or key not in columns]:
            raise UserCodeError(f"rollout_func gave no {', '.join(missing)}; expected a dict with {', '.join(_NEEDED)}")
        if wrong := {key: len(values) for key, values in columns.items() if len(values) != len(prompts)}:
            raise UserCodeError(
                f"rollout_func got {len(prompts)} prompts, and its columns have {wrong} entries; return one for each "
                "prompt"
            )
        groups = (self._group(g, problem, row, columns) for g, (problem, row) in enumerate(opened))
        with hosting(LocalModels(self.policy, self.chat)):
            return list(await asyncio.gather(*groups))

    async def _group(
        self, index: int, problem: Problem, episodes: Sequence[Episode], columns: Mapping[str, Sequence[Any]]
    ) -> Group:
        first = index * len(episodes)
        mine = slice(first, first + len(episodes))
        extra = {k: v[mine] for k, v in columns.items() if k not in (*_NEEDED, "env_mask")}
        with logging_calls() as calls:
            made = (self._rollout(problem, episode, columns, first + i) for i, episode in enumerate(episodes))
            scored = await scored_together(self.environment, episodes, await asyncio.gather(*made))
            group = await self.rewards.reward(problem, scored, episodes, self.environment.reward_weights, extra)
        return with_call_metrics(group, calls)

    async def _rollout(
        self, problem: Problem, episode: Episode, columns: Mapping[str, Sequence[Any]], i: int
    ) -> Rollout:
        completion = list(columns["completion_ids"][i])
        mask = columns["env_mask"][i] if "env_mask" in columns else [1] * len(completion)
        prompt = Turn("template", columns["prompt_ids"][i])
        turns = (prompt, *_turns(completion, columns["logprobs"][i], mask, self.policy.version))
        messages = (*episode.prompt, self.chat.read(completion))
        stop: StopReason = "truncated" if "truncated" in columns and columns["truncated"][i] else "answered"
        scores, error = {}, None
        try:
            scores = dict(await wrap_user_error("scoring", episode.score(messages, ())))
        except PalestraError as failure:
            error = str(failure)
        return Rollout(problem.id, turns, messages, "failed" if error else stop, scores=scores, error=error)


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
