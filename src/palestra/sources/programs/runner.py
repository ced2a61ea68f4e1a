"""Groups of attempts by an agent's program: each has an endpoint of its own at the gateway.

A program may be several agents: `Roles` says which are trained, and makes one rollout out of all of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.agents.programs import Endpoint, ProgramAgent, ProgramLimits
from palestra.core.calls import in_lane
from palestra.core.errors import PalestraError, RolloutError, text_of
from palestra.core.messages import to_dict
from palestra.core.types import Group, Lineage, Message, Problem, ProgramResult, Rollout, SamplingParams, Score
from palestra.envs.base import Episode
from palestra.envs.running import NotOpened, Opener
from palestra.envs.suite_env import SuiteEnvironment, SuiteEpisode
from palestra.rollout.collect import Runner, Started
from palestra.rollout.rewards import MAIN_ROLE, role_score
from palestra.servers.forwarding import ForwardedAgent
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.conversation_tree import SharedPrompts
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.workers import WorkerAttempt, WorkerPrompts
from palestra.servers.openai.completer import Completer

TRAIN, START, CHECKPOINT = "train", "start", "checkpoint"
ENDPOINTS = ("http://", "https://")  # models elsewhere begin with these
Conversations = dict[str, tuple[Message, ...]]  # by the labels of agents
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

    def of_group(self, gateway: Gateway, siblings: int) -> GroupModels:
        """The models of a group's agents (by an empty label: the gateway's own), and the prompts they share."""
        own = gateway.shared_prompts(siblings)
        models: GroupModels = {"": (own, None)}
        for label, model in self.models.items():
            frozen = self._frozen.get(model)
            models[label] = own if frozen is None else SharedPrompts(frozen.policy, siblings), frozen
        return models

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

    async def finish(self) -> tuple[Rollout, Conversations]:
        """End all of them: one rollout with what is trained, and the last conversation of each labelled agent."""
        rollout = await self.main.finish()
        ended = {label: await agent.finish() for label, agent in self.others.items()}
        by_label = {label: each for label, each in ended.items() if each is not None}
        # the first one with turns; all other conversations are its lineages, each with its role
        spoken = [r for r in (rollout, *(replace(by_label[name], role=name) for name in self.trained)) if r.turns]
        if spoken:
            rollout, *others = spoken
            lineages = [replace(lineage, role=rollout.role) for lineage in rollout.lineages]
            for other in others:
                lineages.append(Lineage(other.turns, other.messages, other.stop, other.role))
                lineages += [replace(lineage, role=other.role) for lineage in other.lineages]
            rollout = replace(rollout, lineages=tuple(lineages))
        messages = {label: each.messages for label, each in by_label.items()}
        untrained = {label: said for label, said in messages.items() if label not in self.trained and said}
        if untrained:
            frozen = {label: [to_dict(message) for message in said] for label, said in untrained.items()}
            rollout = replace(rollout, info={**rollout.info, "frozen_agents": frozen})
        return rollout, messages


_COUNTS = {  # statistic of an attempt's conversations -> its metric
    "lineages": "rows_per_attempt",
    "requests": "requests_per_attempt",
    "recomputed_tokens": "recomputed_tokens",
    "retokenised_turns": "retokenised_turns",
    "discarded_turns": "discarded_turns",
}
POSTED = "reward"  # the score that an external agent posts for itself


@dataclass(frozen=True, slots=True)
class ProgramRunner(Runner):
    """Attempts by a program, each at an endpoint of its own; `slots` limit how many run. The same seed key gives the
    same turns to a program that asks the same."""

    environment: SuiteEnvironment
    program: ProgramAgent
    gateway: Gateway
    sampling: SamplingParams
    limits: ProgramLimits
    slots: asyncio.Semaphore
    hidden: frozenset[str] = frozenset({"expect"})  # columns of a case that the agent does not see
    roles: Roles = field(default_factory=Roles)
    runs_programs = True

    async def open(self, opener: Opener, problem: Problem, count: int) -> list[Episode]:
        """Stand-ins: what measures look at is opened when the program has ended."""
        return [SuiteEpisode(problem, (), (), ())] * count

    async def begin(self, groups: Sequence[Started]) -> None:
        await self.gateway.start()
        self.roles.load_models()

    def start(self, group: Started) -> None:
        """Its state: the models of the agents' labels, newest last, and the agents of each attempt."""
        group.state = [self.roles.of_group(self.gateway, len(group.episodes))], {}

    def close(self, group: Started) -> None:
        for prompts in dict.fromkeys(prompts for models in group.state[0] for prompts, _ in models.values()):
            prompts.close()

    def metrics(self, started: Started, group: Group) -> dict[str, Any]:
        """Statistics of the agents that are trained, averaged over the attempts, and the rewards of roles."""
        metrics, weights = dict[str, Any](), self.environment.reward_weights
        for name, key in _COUNTS.items():
            counts = [sum(getattr(a.counts, name) for a in agents.recorded) for agents in started.state[1].values()]
            metrics[f"agent/{key}"] = fmean(counts)
        good = [r for r in group.rollouts if r.error is None]
        for role in dict.fromkeys(role for r in good for score in r.scores.values() for role in score.roles):
            rewards = [weights.get(n, 1.0) * role_score(s, role) for r in good for n, s in r.scores.items()]
            metrics[f"reward/{role}"] = sum(rewards) / len(good)
        return metrics

    async def attempt(self, group: Started, i: int, seed_key: str) -> Rollout:
        """Also once again, by another gateway worker, if its own has ended meanwhile."""
        problem = group.problem
        async with self.slots:
            rollout, conversations, result = await self._run(group, i, seed_key)
            if rollout.error is not None and getattr(group.state[1][i].main, "is_lost", False):
                rollout, conversations, result = await self._run(group, i, seed_key)
        error = rollout.error
        if error is None and not rollout.turns:
            error = result.explain_silence()
        rollout, scores = replace(rollout, info={**rollout.info, **result.record()}), dict[str, Score]()
        try:
            opened: Any = await Opener(self.environment).open(problem, 1)
            if isinstance(opened, NotOpened):
                raise RolloutError(opened.reason)
            episode: SuiteEpisode = replace(opened[0], program=result, agents=conversations, roles=self.roles.labels)
            group.episodes[i] = episode
            if error is None:
                with in_lane(episode.lane):
                    scores = dict(await episode.score(rollout.messages, rollout.tool_results))
                if result.reward is not None:
                    passed = None if scores else result.reward >= 1.0
                    scores[POSTED] = Score(result.reward, passed, "posted by the agent")
                elif self.program.posts_reward and not scores:
                    error = "the agent posted no reward, and there is no measure"
        except PalestraError as failure:
            error = error or str(failure)
        return replace(rollout, scores=scores, error=error, stop="failed" if error else rollout.stop)

    async def _run(self, group: Started, i: int, seed_key: str) -> tuple[Rollout, Conversations, ProgramResult]:
        """Run the program once: its rollout, with what failed it, and the last conversation of each labelled agent."""
        all_models, agents = group.state
        if getattr(all_models[-1][""][0], "is_lost", False):
            all_models.append(self.roles.of_group(self.gateway, len(group.episodes)))
        opened = self.roles.open(self.gateway, group.problem, seed_key, self.sampling, all_models[-1])
        agents[i], result, error = opened, ProgramResult(), None
        try:
            result = await self.program.run(case_of(group.problem, self.hidden), opened.endpoint, self.limits)
            error = result.failure(self.limits.timeout_s, self.limits.max_output_bytes)
        except RolloutError as failure:
            error = str(failure)
        except Exception as failure:  # whatever an agent sends or writes fails its own attempt only
            error = f"running the agent raised {text_of(failure)}"
        finally:
            rollout, conversations = await opened.finish()
        # the gateway's error is the cause of the program's
        return replace(rollout, error=rollout.error or error), conversations, result


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
