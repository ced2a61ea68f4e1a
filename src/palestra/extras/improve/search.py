"""GEPA without merges: texts evolve by reflection. A pool of candidates, and parents by Pareto fronts over cases.

Agrawal et al., "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning" (arXiv 2507.19457).

The package `gepa` (0.1.4) is not used. It exceeds its budget by up to a minibatch and a round of Pareto cases, asks
again after the reflector's budget is spent, and has no value for an attempt without a verdict.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from palestra.agents.texts import Texts
from palestra.core.chat_model import BudgetSpent
from palestra.core.errors import SettingError


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at a case: its score (None: no verdict), its transcript, and the feedback of the measures."""

    case: str
    score: float | None
    transcript: str
    feedback: str
    tokens: int = 0  # sampled


Evaluate = Callable[[Texts, Sequence[str]], Awaitable[list[Trial]]]  # of texts, on cases by id
Reflect = Callable[[Texts, str, Sequence[Trial], int], Awaitable[str | None]]  # a new text for a component, if any


@dataclass(slots=True)
class Candidate:
    """Texts with their score on each case of the Pareto set. Candidate 0 is the agent as it was."""

    number: int
    texts: dict[str, str]
    scores: dict[str, float]
    parents: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()  # components
    how: str = "start"  # or reflection
    turn: int = 0  # whose component it is to change next

    @property
    def mean(self) -> float:
        return fmean(self.scores.values()) if self.scores else 0.0


@dataclass
class Search:
    """Evolves texts until the budget is spent."""

    evaluate: Evaluate
    reflect: Reflect
    feedback_cases: Sequence[str]  # from which minibatches are drawn
    pareto_cases: Sequence[str]  # on which candidates are compared
    components: Sequence[str]  # that may change
    on_event: Callable[[str], None] = lambda text: None
    budget: int = 300  # attempts in all
    minibatch: int = 4  # cases that a reflection sees
    seed: int = 0
    candidates: list[Candidate] = field(default_factory=list, init=False)
    used: int = field(default=0, init=False)  # attempts
    sampled_tokens: int = field(default=0, init=False)
    rejected: int = field(default=0, init=False)

    async def run(self, texts: Texts) -> Candidate:
        """The best candidate by its mean over the Pareto cases; the first one where several are as good."""
        least = len(self.pareto_cases) + 2 * self.minibatch
        if self.budget < least:
            raise SettingError(
                f"a budget of {self.budget} attempts is too small for {len(self.pareto_cases)} cases and minibatches "
                f"of {self.minibatch}; give at least {least}, or compare on fewer cases"
            )
        rng = random.Random(self.seed)
        await self._add(Candidate(0, dict(texts), {}))
        iteration = 0
        while self.used + 2 * self.minibatch <= self.budget:
            iteration += 1
            try:
                await self._mutate(rng, iteration)
            except BudgetSpent as end:  # of the reflector; the search ends with what it has
                self.on_event(f"{end}; the search ends")
                break
            if self.rejected >= 8 * len(self.candidates) + 40:  # the reflector has nothing to say
                self.on_event("the reflector gave no text that could be used; the search ends")
                break
        return max(self.candidates, key=lambda candidate: (candidate.mean, -candidate.number))

    async def _mutate(self, rng: random.Random, iteration: int) -> None:
        """Let the reflector rewrite one component of a parent, and keep the child if it is better."""
        parent = choose_parent(self.candidates, rng)
        component = self.components[parent.turn % len(self.components)]
        parent.turn += 1
        cases = rng.sample(list(self.feedback_cases), min(self.minibatch, len(self.feedback_cases)))
        before = await self._trials(parent.texts, cases)
        if all((trial.score or 0.0) >= 1.0 for trial in before):
            return  # nothing to learn from these
        text = await self.reflect(parent.texts, component, before, iteration)
        if text is None or text == parent.texts[component]:
            self.rejected += 1
            return
        texts = {**parent.texts, component: text}
        after = await self._trials(texts, cases)
        old = {trial.case: trial.score for trial in before if trial.score is not None}
        # by how much the scores rose on the cases that both have a verdict on
        if sum(t.score - old[t.case] for t in after if t.score is not None and t.case in old) <= 0.0:
            self.rejected += 1
            return
        await self._add(
            Candidate(len(self.candidates), texts, {}, (parent.number,), (component,), "reflection", parent.turn)
        )

    async def _add(self, new: Candidate) -> None:
        """Score a candidate on the Pareto cases and add it, if the budget allows it."""
        if self.used + len(self.pareto_cases) > self.budget:
            return
        trials = await self._trials(new.texts, self.pareto_cases)
        new.scores = {trial.case: trial.score for trial in trials if trial.score is not None}
        self.candidates.append(new)
        what = f" ({new.how}: {', '.join(new.changed)})" if new.changed else ""
        self.on_event(f"candidate {new.number}: {new.mean:.3f}{what}; {self.used} of {self.budget} attempts")

    async def _trials(self, texts: Texts, cases: Sequence[str]) -> list[Trial]:
        trials = await self.evaluate(texts, cases)
        self.used += len(trials)
        self.sampled_tokens += sum(trial.tokens for trial in trials)
        return trials


def front(candidates: Sequence[Candidate]) -> dict[int, int]:
    """The candidates that are best on some case, without dominated ones, and on how many cases each is best.

    A candidate is dominated if on each case on which it is best another one of the front is as good.
    """
    cases = dict.fromkeys(case for candidate in candidates for case in candidate.scores)
    best: dict[str, set[int]] = {}
    for case in cases:
        top = max(c.scores.get(case, 0.0) for c in candidates)
        best[case] = {c.number for c in candidates if c.scores.get(case, 0.0) >= top - 1e-9}
    alive = set().union(*best.values()) if best else {candidates[0].number}
    means = {c.number: c.mean for c in candidates}
    for number in sorted(alive, key=lambda n: (means[n], -n)):  # the weakest first; of equal ones the newest
        rest = alive - {number}
        if rest and all(members & rest for members in best.values() if number in members):
            alive = rest
    return {number: sum(number in members for members in best.values()) for number in sorted(alive)}


def choose_parent(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """One of the front, with a probability that grows with the cases on which it is best."""
    counts = front(candidates)
    return candidates[rng.choices(list(counts), [max(1, count) for count in counts.values()])[0]]
