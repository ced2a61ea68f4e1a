"""Rejection sampling: attempt the training cases, learn from the attempts that passed, and attempt them again.

A round first makes plain attempts, which show how often the model passes. Cases that did not pass are attempted again,
more often, at higher temperatures, and with a hint in the prompt: rules against the mistakes that were seen, solved
cases as examples, in the end the expected answer. What passed becomes a demonstration without its hint.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np

from palestra.core.config_sections import StagesSection
from palestra.core.types import Group, Problem, Rollout
from palestra.envs.base import Environment
from palestra.models.chat.template import ChatFormat
from palestra.rollout.collect import GroupCollector, OnRollout
from palestra.rollout.hints import Hint, HintedEnvironment, pass_rate, quality, rules_for
from palestra.train.demonstrations import DemonstrationSource, sampled_key, steps_for

HOTTER = 0.1  # the temperature rises by this with each pass over the cases that have not passed
MAX_TEMPERATURE = 1.2
PLAIN_ATTEMPTS = 8
EXAMPLES = 2  # solved cases that a hint shows
WORTH_IMITATING = 1  # the `quality` up to which a rollout becomes a demonstration, if there are any
MIN_STEPS = 6  # of a round
NEW_PER_ROUND = 256  # demonstrations: a model that has learned from these finds better ones
ENOUGH_CASES = 96  # that plain attempts solved: a round with as many needs no hints


@dataclass(slots=True)
class Round:
    """Rollouts of one round."""

    number: int
    plain: list[Rollout] = field(default_factory=list)
    hinted: list[Rollout] = field(default_factory=list)
    found: dict[str, list[Rollout]] = field(default_factory=lambda: defaultdict(list))  # passed, by problem

    @property
    def solved_share(self) -> float:
        """The share of the cases in which at least one plain attempt passed."""
        cases = {r.problem_id for r in self.plain}
        return len({r.problem_id for r in self.plain if r.passed}) / max(1, len(cases))

    def metrics(self) -> dict[str, float]:
        attempts = [*self.plain, *self.hinted]
        rates = {"rft/pass_rate": pass_rate(self.plain), "rft/solved_cases": self.solved_share}
        if self.hinted:
            rates["rft/hinted_pass_rate"] = pass_rate(self.hinted)
        return rates | {
            "rft/round": float(self.number),
            "rft/attempts": float(len(attempts)),
            "rft/passed": float(sum(r.passed for r in attempts)),
            "sampled_tokens": float(sum(r.sampled_tokens for r in attempts)),
        }


@dataclass(slots=True)
class RftSource(DemonstrationSource):
    """The source of an rft stage: rounds of sampling, each followed by some steps on what was found so far."""

    environment: Environment = None  # type: ignore[assignment]
    # at a temperature, with so many turns at the beginning that must be tool calls (where the sampler takes grammars)
    collector: Callable[[Environment, float, int], GroupCollector] = None  # type: ignore[assignment]
    chat: ChatFormat = None  # type: ignore[assignment]
    settings: StagesSection = field(default_factory=StagesSection)
    temperature: float = 1.0
    note: Callable[[str], None] = lambda text: None
    on_rollout: OnRollout = lambda rollout: None
    round: int = 0
    steps_left: int = 0  # of this round
    stage: str = "rft"
    ends_by_itself: bool = True
    best: float = 0.0  # the highest share of solved cases so far

    @property
    def samples_next(self) -> bool:
        return not self.steps_left

    async def next(self, count: int, version: int) -> list[Group]:
        self.metrics = {}
        if not self.steps_left:
            self.round += 1
            this = Round(self.round)
            await self._attempt(this)
            covered, before = self._covered(), self.count
            self.store.add(self._chosen(this))
            self.count, self.drawn = len(self.store) - self.first, 0
            self.metrics = this.metrics() | {"rft/covered_cases": float(len(self._covered()))}
            hinted = f", {pass_rate(this.hinted):.1%} of {len(this.hinted)} with hints" if this.hinted else ""
            self.note(
                f"rft round {this.number}: {pass_rate(this.plain):.1%} of {len(this.plain)} attempts passed{hinted}; "
                f"{self.count - before} new demonstrations, {self.count} in all, of {len(self._covered())} cases"
            )
            helps = this.solved_share > self.best or len(self._covered()) > len(covered)
            self.best = max(self.best, this.solved_share)
            self.is_done = not self.count or not helps or this.solved_share >= self.settings.rft_until
            learned = max(1, min(self.count, 2 * NEW_PER_ROUND))
            self.steps_left = max(MIN_STEPS, steps_for(learned, self.settings.sft_epochs, count))
        self.metrics["demonstrations"] = float(self.count)
        if self.is_done:
            return []
        self.steps_left -= 1
        self.is_done = not self.steps_left and self.round >= self.settings.rft_rounds
        return self.draw(count)

    def _covered(self) -> set[str]:
        """The cases that there is a demonstration of."""
        return {rollout.problem_id for rollout in self.store.rollouts[self.first :]}

    async def _attempt(self, this: Round) -> None:
        """Plain attempts, then passes with hints over cases without a demonstration: more attempts at fewer cases."""
        most, in_pass = self.settings.rft_attempts or 1, self.settings.rft_pass or 1
        problems = list(self.environment.problems("train"))
        random.Random(f"{self.seed}/{self.round}").shuffle(problems)
        attempts, passes = min(PLAIN_ATTEMPTS, most), 1
        this.plain = await self._sample(this, problems[: max(1, in_pass // attempts)], {}, attempts, 0)
        covered = self._covered()
        if len(this.found.keys() - covered) >= ENOUGH_CASES:
            return
        while attempts <= most and this.solved_share < self.settings.rft_until:
            problems = [problem for problem in problems if problem.id not in covered and problem.id not in this.found]
            if not problems:
                break
            some = problems[: max(1, in_pass // attempts)]
            hints = self._hints(this, some, passes) if self.settings.hints else {}
            this.hinted += await self._sample(this, some, hints, attempts, passes)
            attempts, passes = 2 * attempts, passes + 1

    async def _sample(
        self, this: Round, problems: Sequence[Problem], hints: Mapping[str, Hint], attempts: int, passes: int
    ) -> list[Rollout]:
        """Attempt the problems, and take the hints out of what passed."""
        hinted = HintedEnvironment(self.environment, hints)
        temperature = max(self.temperature, min(MAX_TEMPERATURE, self.temperature + HOTTER * passes))
        keys = [f"rft/{self.seed}/{self.round}/{passes}/{problem.id}" for problem in problems]
        forced_calls = self._forced_calls(this, passes) if hints else 0
        collector = self.collector(hinted, temperature, forced_calls)
        groups = await collector.collect(problems, attempts, keys, self.on_rollout)
        rollouts = [r for group in groups for r in group.rollouts if r.error is None]
        rollouts = [hinted.without_hint(r, self.chat) if r.passed and r.problem_id in hints else r for r in rollouts]
        for rollout in rollouts:
            is_told = rollout.problem_id in hints and hints[rollout.problem_id].tells_answer
            if rollout.passed and not rollout.cut_off and not (is_told and quality(rollout) > 0):
                this.found[rollout.problem_id].append(rollout)
        return rollouts

    def _forced_calls(self, this: Round, passes: int) -> int:
        """How many tool calls a hinted attempt begins with: one where the model rarely calls, and more than it makes
        on its own, one more in each pass, until something has passed."""
        usual = int(median(sum(result.ok for result in r.tool_results) for r in this.plain)) if this.plain else 0
        if self.count > 0 or this.found:
            return 0 if usual else 1
        return usual + passes

    def _hints(self, this: Round, problems: Sequence[Problem], passes: int) -> dict[str, Hint]:
        """Rules against what went wrong, and solved cases; the expected answer where that did not help."""
        rules = rules_for([r for r in this.plain if not r.passed])
        found = [r for rollouts in this.found.values() for r in rollouts]
        solved = [r for r in (*self.store.rollouts[self.first :], *found) if quality(r) <= WORTH_IMITATING]
        weights = [1 + len(r.tool_results) for r in solved]  # cases that are left tend to need more calls
        tells_answer = passes % 2 == 0
        hints = {}
        for problem in problems:
            chosen = random.Random(f"{self.seed}/{self.round}/{passes}/{problem.id}")
            shown = {id(r): r for r in chosen.choices(solved, weights, k=EXAMPLES)} if solved else {}
            # without the instructions, which the prompt has
            examples = [tuple(m for m in r.messages if m.role != "system") for r in shown.values()]
            hints[problem.id] = Hint(rules, tuple(examples), tells_answer=tells_answer)
        return hints

    def _chosen(self, this: Round) -> list[Rollout]:
        """The best of what passed, a few of each case, none twice; guesses only where there is nothing else."""
        stored = self.store.rollouts[self.first :]
        known, counts = set(map(sampled_key, stored)), Counter(rollout.problem_id for rollout in stored)
        found = [(_order(r), r) for rollouts in this.found.values() for r in rollouts]
        best = min([*(order[0] for order, _ in found), *map(quality, stored)], default=0)
        chosen: list[Rollout] = []
        for order, rollout in sorted(found, key=itemgetter(0)):
            key = sampled_key(rollout)
            if order[0] > max(best, WORTH_IMITATING) or key in known:
                continue
            if counts[rollout.problem_id] < self.settings.rft_keep:
                known.add(key)
                counts[rollout.problem_id] += 1
                chosen.append(rollout)
        return chosen[:NEW_PER_ROUND]

    def state(self) -> dict[str, Any]:
        own = {"round": self.round, "steps_left": self.steps_left, "is_done": self.is_done, "best": self.best}
        return DemonstrationSource.state(self) | own

    def restore(self, state: Mapping[str, Any]) -> None:
        DemonstrationSource.restore(self, state)
        self.round, self.steps_left = int(state.get("round", 0)), int(state.get("steps_left", 0))
        self.is_done, self.best = bool(state.get("is_done")), float(state.get("best", 0.0))


def _order(rollout: Rollout) -> tuple[float, ...]:
    """The better demonstrations first: by quality, failed calls, and how likely the model was to say them."""
    failed = sum(not result.ok for result in rollout.tool_results)
    logprobs = [turn.logprobs for turn in rollout.turns if turn.maker == "model"]
    return quality(rollout), failed, -float(np.concatenate(logprobs).mean())
