"""Several agents in one program: which are trained, which are frozen, and one rollout out of all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.agents.programs import Endpoint
from palestra.core.messages import to_dict
from palestra.core.types import Group, Lineage, Message, Problem, Rollout, SamplingParams
from palestra.rollout.rewards import MAIN_ROLE, role_score
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
        messages = {label: ended.messages for label, ended in by_label.items()}
        merged = _merged([rollout, *(replace(by_label[label], role=label) for label in self.trained)])
        frozen = {
            label: [to_dict(m) for m in said] for label, said in messages.items() if label not in self.trained and said
        }
        return (replace(merged, info={**merged.info, "frozen_agents": frozen}) if frozen else merged), messages


def _merged(rollouts: Sequence[Rollout]) -> Rollout:
    """The first one with turns; all other conversations are its lineages, each with its role."""
    spoken = [rollout for rollout in rollouts if rollout.turns]
    if not spoken:
        return rollouts[0]
    first, *others = spoken
    lineages = [replace(lineage, role=first.role) for lineage in first.lineages]
    for rollout in others:
        own = Lineage(rollout.turns, rollout.messages, rollout.stop, rollout.role)
        lineages += [own, *(replace(lineage, role=rollout.role) for lineage in rollout.lineages)]
    return replace(first, lineages=tuple(lineages))


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
