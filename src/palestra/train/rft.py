"""Rejection sampling: attempt the training cases, learn from the attempts that passed, and attempt them again.

A round first makes plain attempts, which show how often the model passes. Cases that did not pass are attempted again,
more often, at higher temperatures, and with a hint in the prompt: rules against the mistakes that were seen, solved
cases as examples, in the end the expected answer. What passed becomes a demonstration without its hint.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.core.config_sections import StagesSection
from palestra.core.types import Group, Problem, Rollout
from palestra.envs.base import Environment
from palestra.models.chat.template import ChatFormat
from palestra.rollout.collect import OnRollout
from palestra.rollout.evaluate import CollectsGroups
from palestra.rollout.hints import Hint, HintedEnvironment, quality, rules_for, with_hints
from palestra.train.demonstration_source import DemonstrationSource, steps_for

HOTTER = 0.1  # the temperature rises by this with each pass over the cases that have not passed
MAX_TEMPERATURE = 1.2
PLAIN_ATTEMPTS = 8
EXAMPLES = 2  # solved cases that a hint shows
ENOUGH = 64  # new demonstrations in a round: a model that learned from these finds others faster
MIN_STEPS = 6  # of a round
NEW_TOKENS = "sampled_tokens"


@dataclass(slots=True)
class Round:
    """What a round found."""

    number: int
    plain: list[Rollout] = field(default_factory=list)
    hinted: list[Rollout] = field(default_factory=list)
    found: dict[str, list[Rollout]] = field(default_factory=lambda: defaultdict(list))  # passed, by problem

    @property
    def plain_pass_rate(self) -> float:
        return _pass_rate(self.plain)

    def metrics(self) -> dict[str, float]:
        attempts = [*self.plain, *self.hinted]
        rates = {"rft/pass_rate": self.plain_pass_rate}
        if self.hinted:
            rates["rft/hinted_pass_rate"] = _pass_rate(self.hinted)
        return rates | {
            "rft/round": float(self.number),
            "rft/attempts": float(len(attempts)),
            "rft/passed": float(sum(r.passed for r in attempts)),
            "rft/cases_passed": float(len(self.found)),
            NEW_TOKENS: float(sum(r.sampled_tokens for r in attempts)),
        }


@dataclass(slots=True)
class RftSource(DemonstrationSource):
    """The source of an rft stage: rounds of sampling, each followed by some steps on what was found so far."""

    environment: Environment = None  # type: ignore[assignment]
    collector: Callable[[Environment, float], CollectsGroups] = None  # type: ignore[assignment]  # at a temperature
    chat: ChatFormat = None  # type: ignore[assignment]
    settings: StagesSection = field(default_factory=StagesSection)
    temperature: float = 1.0
    note: Callable[[str], None] = lambda text: None
    on_rollout: OnRollout = lambda rollout: None
    round: int = 0
    steps_left: int = 0  # of this round

    async def next(self, count: int, version: int) -> list[Group]:
        self.metrics = {}
        if not self.steps_left:
            await self._begin_round(count)
        self.metrics["demonstrations"] = float(self.count)
        if self.is_done:
            return []
        self.steps_left -= 1
        self.is_done = not self.steps_left and self.round >= self.settings.rft_rounds
        return self.draw(count)

    async def _begin_round(self, batch: int) -> None:
        self.round += 1
        this = Round(self.round)
        await self._attempt(this)
        before = self.count
        self.store.add(self._chosen(this))
        self.count, self.drawn = len(self.store) - self.first, 0
        self.metrics = this.metrics()
        self.note(self._text(this, self.count - before))
        self.is_done = this.plain_pass_rate >= self.settings.rft_until or self.count == before
        self.steps_left = max(MIN_STEPS, steps_for(max(1, self.count), self.settings.sft_epochs, batch))

    async def _attempt(self, this: Round) -> None:
        """Plain attempts, then passes with hints over cases that have not passed: ever more attempts at fewer cases."""
        most, in_pass = self.settings.rft_attempts or 1, self.settings.rft_pass or 1
        problems, attempts, passes = self._cases(), min(PLAIN_ATTEMPTS, most), 1
        this.plain = await self._sample(this, problems[: max(1, in_pass // attempts)], {}, attempts, 0)
        while attempts <= most and sum(map(len, this.found.values())) < ENOUGH:
            problems = [problem for problem in problems if problem.id not in this.found]
            if not problems:
                break
            some = problems[: max(1, in_pass // attempts)]
            hints = self._hints(this, some, passes) if self.settings.hints else {}
            this.hinted += await self._sample(this, some, hints, attempts, passes)
            attempts, passes = 2 * attempts, passes + 1

    async def _sample(
        self, this: Round, problems: Sequence[Problem], hints: Mapping[str, Hint], attempts: int, passes: int
    ) -> list[Rollout]:
        """Attempt the problems, and take the hints out of what was said."""
        hinted: HintedEnvironment = with_hints(self.environment, hints)
        temperature = max(self.temperature, min(MAX_TEMPERATURE, self.temperature + HOTTER * passes))
        keys = [f"rft/{self.seed}/{self.round}/{passes}/{problem.id}" for problem in problems]
        groups = await self.collector(hinted, temperature).collect(problems, attempts, keys, self.on_rollout)
        rollouts = [r for group in groups for r in group.rollouts if r.error is None]
        rollouts = [hinted.without_hint(r, self.chat) if r.passed or r.problem_id in hints else r for r in rollouts]
        for rollout in rollouts:
            if rollout.passed and not rollout.cut_off:
                this.found[rollout.problem_id].append(rollout)
        return rollouts

    def _cases(self) -> list[Problem]:
        """All cases, in an order that changes with the round."""
        problems = list(self.environment.problems("train"))
        random.Random(f"{self.seed}/{self.round}").shuffle(problems)
        return problems

    def _hints(self, this: Round, problems: Sequence[Problem], passes: int) -> dict[str, Hint]:
        """Rules against what went wrong, and solved cases; the expected answer where that did not help."""
        rules = rules_for([r for r in this.plain if not r.passed])
        solved = [*self.store.rollouts[self.first :], *(r for found in this.found.values() for r in found)]
        best = min(map(quality, solved), default=0)
        examples = [_conversation(r) for r in solved if quality(r) == best]
        tells_answer = (passes > 1 and passes % 2 == 0) or (passes > 1 and not examples)
        hints = {}
        for problem in problems:
            chosen = random.Random(f"{self.seed}/{self.round}/{passes}/{problem.id}")
            shown = tuple(chosen.sample(examples, min(EXAMPLES, len(examples))))
            hints[problem.id] = Hint(rules, shown, tells_answer=tells_answer)
        return hints

    def _chosen(self, this: Round) -> list[Rollout]:
        """Demonstrations of the best quality that the round has, a few of each case, none twice."""
        known = {_key(rollout) for rollout in self.store.rollouts[self.first :]}
        counts = defaultdict[str, int](int)
        for rollout in self.store.rollouts[self.first :]:
            counts[rollout.problem_id] += 1
        best = min((quality(r) for found in this.found.values() for r in found), default=0)
        chosen: list[Rollout] = []
        for problem_id in sorted(this.found):
            for rollout in sorted(this.found[problem_id], key=lambda r: (len(r.tool_results), r.sampled_tokens)):
                if quality(rollout) > best or _key(rollout) in known or counts[problem_id] >= self.settings.rft_keep:
                    continue
                known.add(_key(rollout))
                counts[problem_id] += 1
                chosen.append(rollout)
        return chosen

    def _text(self, this: Round, new: int) -> str:
        hinted = f", {_pass_rate(this.hinted):.1%} of {len(this.hinted)} with hints" if this.hinted else ""
        return (
            f"rft round {this.number}: {this.plain_pass_rate:.1%} of {len(this.plain)} attempts passed{hinted}; "
            f"{new} new demonstrations, {self.count} in all"
        )

    def state(self) -> dict[str, Any]:
        own = {"round": self.round, "steps_left": self.steps_left, "is_done": self.is_done}
        return DemonstrationSource.state(self) | own

    def restore(self, state: Mapping[str, Any]) -> None:
        DemonstrationSource.restore(self, state)
        self.round, self.steps_left = int(state.get("round", 0)), int(state.get("steps_left", 0))
        self.is_done = bool(state.get("is_done"))


def _key(rollout: Rollout) -> tuple[Any, ...]:
    """What the model said, for finding repetitions."""
    turns = (turn.token_ids.tobytes() for turn in rollout.turns if turn.maker == "model")
    return (rollout.problem_id, *turns)


def _conversation(rollout: Rollout) -> tuple[Any, ...]:
    """A solved case to show: without the instructions, which the prompt has."""
    return tuple(message for message in rollout.messages if message.role != "system")


def _pass_rate(rollouts: Sequence[Rollout]) -> float:
    return sum(r.passed for r in rollouts) / max(1, len(rollouts))
