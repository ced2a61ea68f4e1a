"""Groups of attempts by an agent's program: each has an endpoint of its own at the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from palestra.agents.programs import ProgramAgent, ProgramLimits
from palestra.core.chat_model import ModelHost, hosting, logging_calls
from palestra.core.errors import PalestraError, RolloutError, text_of
from palestra.core.messages import to_dict
from palestra.core.types import Group, Message, Problem, ProgramResult, Rollout, SamplingParams, Score
from palestra.envs.suite_env import SuiteEnvironment, SuiteEpisode
from palestra.rollout.agent_loop import wrap_user_error
from palestra.rollout.collect import OnRollout, all_groups, scored_together, with_call_metrics
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import RewardFunctions
from palestra.servers.gateway.gateway import Gateway
from palestra.sources.programs.roles import Agents, GroupModels, Roles, role_metrics

POSTED = "reward"  # the score that an external agent posts for itself


@dataclass(frozen=True, slots=True)
class ProgramCollector:
    """Collects groups of scored attempts, `max_at_once` at a time. Failures are recorded on the rollout."""

    environment: SuiteEnvironment
    program: ProgramAgent
    gateway: Gateway
    sampling: SamplingParams
    limits: ProgramLimits
    max_at_once: int
    slots: asyncio.Semaphore
    rewards: RewardFunctions = field(default_factory=RewardFunctions)
    hidden: frozenset[str] = frozenset({"expect"})  # columns of a case that the agent does not see
    roles: Roles = field(default_factory=Roles)
    host: ModelHost = field(default_factory=LocalModels)  # of judges that are models of this process

    def groups_at_once(self, group_size: int) -> int:
        """Maximum number of groups in flight."""
        return max(1, self.max_at_once // group_size)

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
    ) -> list[Group]:
        """One group for each problem. The same seed key gives the same turns to an agent that asks the same."""
        await self.gateway.start()
        with hosting(self.host):
            tasks = [
                asyncio.create_task(self._group(problem, group_size, key, on_rollout))
                for problem, key in zip(problems, seed_keys, strict=True)
            ]
        try:
            return await all_groups(tasks, self.rewards)
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)  # no process outlives the step

    async def _group(self, problem: Problem, group_size: int, key: str, on_rollout: OnRollout) -> Group:
        with self.roles.of_group(self.gateway, group_size) as models, logging_calls() as calls:
            tasks = [
                asyncio.create_task(self._one(problem, f"{key}/{i}", models, on_rollout)) for i in range(group_size)
            ]
            try:
                done = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            episodes = [episode or SuiteEpisode(problem, (), (), ()) for _, episode, _ in done]
            rollouts = await scored_together(self.environment, episodes, [rollout for rollout, _, _ in done])
            group = await self.rewards.reward(problem, rollouts, episodes, self.environment.reward_weights)
        group = with_call_metrics(group, calls)
        attempts = _metrics([agents for _, _, agents in done])
        roles = role_metrics(group, self.environment.reward_weights)
        return replace(group, metrics={**group.metrics, **attempts, **roles})

    async def _one(
        self, problem: Problem, seed_key: str, models: GroupModels, on_rollout: OnRollout
    ) -> tuple[Rollout, SuiteEpisode | None, Agents]:
        async with self.slots:
            agents = self.roles.open(self.gateway, problem, seed_key, self.sampling, models)
            result, error = ProgramResult(), None
            try:
                result = await self.program.run(case_of(problem, self.hidden), agents.endpoint, self.limits)
                error = result.failure(self.limits.timeout_s, self.limits.max_output_bytes)
            except RolloutError as failure:
                error = str(failure)
            except Exception as failure:  # whatever an agent sends or writes fails its own attempt only
                error = f"running the agent raised {text_of(failure)}"
            finally:
                rollout, conversations = await agents.finish()
        error = rollout.error or error  # the gateway's is the cause of the program's
        if error is None and not rollout.turns:
            error = result.explain_silence()
        rollout = replace(rollout, error=error, info={**rollout.info, **result.record()})
        rollout, episode = await self._scored(problem, rollout, result, conversations)
        on_rollout(rollout)
        return rollout, episode, agents

    async def _scored(
        self, problem: Problem, rollout: Rollout, result: ProgramResult, conversations: Mapping[str, Sequence[Message]]
    ) -> tuple[Rollout, SuiteEpisode | None]:
        """Add the scores of the measures and the posted reward. Errors are recorded."""
        episode, scores, error = None, dict[str, Score](), rollout.error
        try:
            episode = await wrap_user_error("opening an episode", self._open(problem))
            episode = replace(episode, program=result, agents=conversations, roles=self.roles.labels)
            if error is None:
                scores = dict(await wrap_user_error("scoring", episode.score(rollout.messages, rollout.tool_results)))
                if result.reward is not None:
                    passed = None if scores else result.reward >= 1.0
                    scores[POSTED] = Score(result.reward, passed, "posted by the agent")
                elif self.program.posts_reward and not scores:
                    error = "the agent posted no reward, and there is no measure"
        except PalestraError as failure:
            error = error or str(failure)
        return replace(rollout, scores=scores, error=error, stop="failed" if error else rollout.stop), episode

    async def _open(self, problem: Problem) -> SuiteEpisode:
        return self.environment.open(problem)


def case_of(problem: Problem, hidden: Container[str] = ("expect",)) -> dict[str, Any]:
    """The case as the agent sees it: the id and all columns but the hidden ones."""
    text = problem.input if isinstance(problem.input, str) else [to_dict(message) for message in problem.input]
    record = {name: value for name, value in problem.row.items() if name not in hidden}
    return {**record, "id": problem.id, "input": text}


def hidden_columns(problems: Sequence[Problem]) -> frozenset[str]:
    """Columns that no agent may see: `expect` or, where `expect_fn` reads another column, that one.

    A column counts as the answer's only if it equals `expect` in every case: in a single case that may be chance.
    """
    names = frozenset(name for problem in problems for name in problem.row)
    if "expect" in names:
        return frozenset({"expect"})

    def holds_answer(problem: Problem, name: str) -> bool:
        value = problem.row.get(name)
        return problem.expect is not None and type(value) is type(problem.expect) and bool(value == problem.expect)

    return frozenset(name for name in names if all(holds_answer(problem, name) for problem in problems)) | {"expect"}


def _metrics(attempts: Sequence[Agents]) -> dict[str, float]:
    """Statistics of the conversations of the agents that are trained, averaged over the attempts."""
    metrics = {"lineages": "rows_per_attempt", "requests": "requests_per_attempt"}
    return {
        f"agent/{metrics.get(name, name)}": fmean(
            sum(getattr(a.counts, name) for a in one.recorded) for one in attempts
        )
        for name in ("lineages", "requests", "recomputed_tokens", "retokenised_turns", "discarded_turns")
    }
