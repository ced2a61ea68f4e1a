"""Groups of attempts by an agent's program: each has an endpoint of its own at the gateway.

A program may be several agents: `Roles` says which are trained, and makes one rollout out of all of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.agents.programs import Endpoint, ProgramAgent, ProgramLimits
from palestra.core.chat_model import ModelHost, hosting, logging_calls
from palestra.core.errors import PalestraError, RolloutError, text_of
from palestra.core.messages import to_dict
from palestra.core.types import Group, Lineage, Message, Problem, ProgramResult, Rollout, SamplingParams, Score
from palestra.envs.suite_env import SuiteEnvironment, SuiteEpisode
from palestra.rollout.agent_loop import wrap_user_error
from palestra.rollout.collect import OnRollout, all_groups, scored_together, with_call_metrics
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import MAIN_ROLE, RewardFunctions, role_score
from palestra.servers.forwarding import ForwardedAgent
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.shared_prompts import SharedPrompts
from palestra.servers.gateway.workers import WorkerAttempt, WorkerPrompts
from palestra.servers.openai.completer import Completer

TRAIN, START, CHECKPOINT = "train", "start", "checkpoint"
ENDPOINTS = ("http://", "https://")  # models elsewhere begin with these
GroupModels = dict[str, tuple[SharedPrompts | WorkerPrompts, Completer | None]]
KEY_VARIABLE = "PALESTRA_ROLE_KEY_"  # + the label: the key of an endpoint


@dataclass(slots=True)
class Roles:
    """The labelled agents of a program, as `agent.roles` says.

    `load` gives the completer of a frozen model, `newest` the run's newest checkpoint, which changes.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    load: Callable[[str], Completer] | None = None
    newest: Callable[[], Path | None] = lambda: None
    _frozen: dict[str, Completer] = field(default_factory=dict, init=False)
    _checkpoint: str = field(default="", init=False)  # that is loaded

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the agents in measures; none where there is only one."""
        return (MAIN_ROLE, *self.models) if self.models else ()

    def load_models(self) -> None:
        """Load the frozen models that are not loaded yet, and the newest checkpoint."""
        for model in self.models.values():
            if model.startswith(ENDPOINTS) or model == TRAIN:
                continue
            assert self.load is not None
            if model == CHECKPOINT:
                checkpoint = str(self.newest() or START)
                if checkpoint != self._checkpoint:
                    self._frozen[model], self._checkpoint = self.load(checkpoint), checkpoint
            elif model not in self._frozen:
                self._frozen[model] = self.load(model)

    @contextmanager
    def of_group(self, gateway: Gateway, siblings: int) -> Iterator[GroupModels]:
        """The models of a group's agents (by an empty label: the gateway's own), and the prompts they share."""
        self.load_models()
        with ExitStack() as stack:
            own = gateway.shared_prompts(siblings)
            stack.callback(own.close)
            models: GroupModels = {"": (own, None)}
            for label, model in self.models.items():
                frozen = self._frozen.get(model)
                prompts = own if frozen is None else SharedPrompts(frozen.policy, siblings)
                models[label] = prompts, frozen
                if frozen is not None:
                    stack.callback(prompts.close)
            yield models

    def open(
        self, gateway: Gateway, problem: Problem, seed_key: str, sampling: SamplingParams, models: GroupModels
    ) -> Agents:
        """An endpoint for each agent of an attempt."""
        main = gateway.open(problem, seed_key=seed_key, sampling=sampling, shared_prompts=models[""][0])
        others: dict[str, Attempt | ForwardedAgent] = {}
        trained: dict[str, Attempt | WorkerAttempt] = {}
        for label, model in self.models.items():
            if model.startswith(ENDPOINTS):
                url, _, name = model.partition("#")
                api_key = os.environ.get(f"{KEY_VARIABLE}{label.upper()}")
                others[label] = gateway.open_elsewhere(url, name or None, api_key)
            else:
                prompts, frozen = models[label]
                key = f"{seed_key}/{label}"
                agent = gateway.open(problem, seed_key=key, sampling=sampling, shared_prompts=prompts, model=frozen)
                others[label] = agent
                if model == TRAIN:
                    trained[label] = agent
        return Agents(main, others, trained)


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of one attempt: the one without a label, those with one, and which of these are trained."""

    main: Attempt | WorkerAttempt
    others: Mapping[str, Attempt | ForwardedAgent]
    trained: Mapping[str, Attempt | WorkerAttempt]

    @property
    def endpoint(self) -> Endpoint:
        agents = {label: Endpoint(agent.base_url, agent.api_key, agent.id) for label, agent in self.others.items()}
        return Endpoint(self.main.base_url, self.main.api_key, self.main.id, agents)

    @property
    def recorded(self) -> Sequence[Attempt | WorkerAttempt]:
        """The agents whose tokens are trained."""
        return (self.main, *self.trained.values())

    async def finish(self) -> tuple[Rollout, dict[str, tuple[Message, ...]]]:
        """End all of them: one rollout with what is trained, and the last conversation of each labelled agent."""
        rollout = await self.main.finish()
        by_label: dict[str, Rollout] = {}
        for label, agent in self.others.items():
            ended = await agent.finish()
            if ended is not None:
                by_label[label] = ended
        # the first one with turns; all other conversations are its lineages, each with its role
        spoken = [r for r in (rollout, *(replace(by_label[name], role=name) for name in self.trained)) if r.turns]
        if spoken:
            rollout, *others = spoken
            lineages = [replace(lineage, role=rollout.role) for lineage in rollout.lineages]
            for other in others:
                lineages.append(Lineage(other.turns, other.messages, other.stop, other.role))
                lineages += [replace(lineage, role=other.role) for lineage in other.lineages]
            rollout = replace(rollout, lineages=tuple(lineages))
        messages = {label: ended.messages for label, ended in by_label.items()}
        frozen = {
            label: [to_dict(m) for m in said] for label, said in messages.items() if label not in self.trained and said
        }
        return (replace(rollout, info={**rollout.info, "frozen_agents": frozen}) if frozen else rollout), messages


def role_metrics(group: Group, weights: Mapping[str, float]) -> dict[str, Any]:
    """The mean reward of each agent that measures tell apart."""
    good = [r for r in group.rollouts if r.error is None]
    roles = dict.fromkeys(role for r in good for score in r.scores.values() for role in score.roles)
    return {
        f"reward/{role}": sum(
            weights.get(name, 1.0) * role_score(score, role) for r in good for name, score in r.scores.items()
        )
        / len(good)
        for role in roles
    }


_COUNTS = {  # statistic of an attempt's conversations -> its metric
    "lineages": "rows_per_attempt",
    "requests": "requests_per_attempt",
    "recomputed_tokens": "recomputed_tokens",
    "retokenised_turns": "retokenised_turns",
    "discarded_turns": "discarded_turns",
}
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
        metrics: dict[str, Any] = {}
        for name, key in _COUNTS.items():  # of the agents that are trained, averaged over the attempts
            counts = [sum(getattr(a.counts, name) for a in agents.recorded) for _, _, agents in done]
            metrics[f"agent/{key}"] = fmean(counts)
        roles = role_metrics(group, self.environment.reward_weights)
        return replace(group, metrics={**group.metrics, **metrics, **roles})

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

        async def open_episode() -> SuiteEpisode:
            return self.environment.open(problem)

        episode, scores, error = None, dict[str, Score](), rollout.error
        try:
            episode = await wrap_user_error("opening an episode", open_episode())
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
