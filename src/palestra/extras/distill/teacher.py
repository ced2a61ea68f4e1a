"""Distillation along the model's own rollouts: a teacher scores the student's k candidates for every sampled token.

`DistillLoss` compares both at `rollout.temperature`; its gradient is added to that of the policy loss. In
self-distillation (SDPO, arXiv 2601.20802; OPSD, arXiv 2601.18734) the teacher is the model as it is now, with a hint in
its prompt (`rollout.hints`); the weight of a group is 1 − its pass rate. Else the teacher is another model with the
same tokenizer, which reads the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from palestra.algo.batch import Batch, Targets
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, ServiceError, SettingError, UnsupportedError
from palestra.core.http import Request, Retries, ask
from palestra.core.messages import with_text
from palestra.core.types import Array, Group, Lineage, Message, Problem, Rollout
from palestra.envs.base import Environment
from palestra.envs.running import tools_of
from palestra.evals.rollout_stats import leaks_hint
from palestra.extras.distill.loss import TEACHER, WEIGHT, DistillLoss
from palestra.learner.base import Learner
from palestra.learner.frozen import FrozenModel
from palestra.learner.local import LocalLearner
from palestra.models.chat.template import ChatFormat
from palestra.models.loading import LoadedModel, load_model
from palestra.rollout.hints import choose_hint, opening_of, pass_rate
from palestra.train.batch import to_batch

DistillPart = tuple[Batch, DistillLoss]  # of one optimizer step


@dataclass(frozen=True, slots=True)
class DistillRows:
    """The rows of a step that a teacher has something to say about."""

    teacher: Teacher
    config: RunConfig
    batch: Batch
    prompts: Sequence[Array]  # the teacher's, of each row
    weights: Array  # [R]
    passed: Array  # [R] bool
    tokens_total: int  # trained tokens of all rollouts of the step, also of those that are not distilled
    metrics: dict[str, float]  # `parts` adds those of the teacher

    def parts(self, learner: Learner) -> list[DistillPart]:
        """Batches with the student's candidates and the teacher's log-probabilities, one for each optimizer step."""
        if not isinstance(learner, LocalLearner):
            raise no_top_tokens(learner)
        if not self.batch.rows:
            return []
        batch, options = self.batch, self.config.distill
        if isinstance(self.teacher, ServerTeacher):  # it scores the sampled tokens only
            at = np.flatnonzero(batch.predicted(batch.policy_mask))
            ids, ours = batch.token_ids[at][:, None].astype(np.int64), batch.logprobs[at][:, None]
        else:
            ids, ours = learner.top_logprobs(batch, options.top_k)
        theirs = self.teacher.logprobs(teacher_batch(batch, self.prompts, ids))
        gain = teacher_gain(batch, self.passed, ids, theirs.reshape(ids.shape) - ours)
        self.metrics.update({} if gain is None else {"teacher_gain": gain})
        weights = np.repeat(np.repeat(self.weights, batch.count(batch.predicted(batch.policy_mask))), ids.shape[1])
        targets = candidates(batch, ids, {TEACHER: theirs, WEIGHT: weights})
        parts = replace(batch, targets=targets).minibatches(self.config.train.minibatches)
        loss = DistillLoss(
            options.divergence,
            ids.shape[1],
            places_total=self.tokens_total / len(parts),
            coefficient=options.coefficient,
            tail=ids.shape[1] < learner.vocabulary,
        )
        return [(part, loss) for part in parts]


def choose_rows(
    teacher: Teacher, groups: Sequence[Group], advantages: Sequence[Sequence[float]], config: RunConfig
) -> DistillRows:
    """The rollouts of a step with the teacher's prompts. Groups whose rewards are all equal are among them."""
    step = [(group, rollout, own) for group in groups for rollout in group.rollouts for own in rollout.conversations]
    batch = to_batch(groups, advantages, mask_truncated=config.train.mask_truncated)
    trained = batch.count(batch.predicted(batch.policy_mask))
    chosen: list[tuple[int, Array, float, bool]] = []
    too_long = 0
    completions = batch.lengths - batch.prompt_lengths
    for row, number in enumerate(batch.conversations.tolist()):
        group, rollout, conversation = step[number]
        weight = teacher.weight(group)
        prompt = teacher.prompt(group, rollout, conversation) if weight > 0 and trained[row] else None
        if prompt is None:
            continue
        if teacher.context_tokens is not None and len(prompt) + int(completions[row]) > teacher.context_tokens:
            too_long += 1
        else:
            chosen.append((row, prompt, weight, rollout.passed))
    rows, prompts, weights, passed = zip(*chosen, strict=True) if chosen else ((), (), (), ())
    own = batch.select(np.isin(np.arange(batch.rows), rows))
    flags = np.array(weights, np.float32), np.array(passed, np.bool_)
    metrics = {"distill_rollouts": float(len(chosen)), "distill_too_long": float(too_long)} | teacher.metrics(groups)
    return DistillRows(teacher, config, own, prompts, *flags, int(trained.sum()), metrics)


def teacher_gain(batch: Batch, passed: Array, ids: Array, differences: Array) -> float | None:
    """How much better the teacher tells passed from failed rollouts than the student does, in nats per token.

    `differences` [M, k] are teacher − student. What counts is their mean over the sampled tokens of each row: the rows
    that passed against those that failed, in groups with both. None where there is no such group. A teacher whose gain
    is not above 0 does not know what makes an attempt good.
    """
    at = np.flatnonzero(batch.predicted(batch.policy_mask))
    is_sampled = ids == batch.token_ids[at][:, None]
    place, column = np.nonzero(is_sampled)  # places whose sampled token is among the candidates
    row = batch.row_of(at[place])
    counts = np.bincount(row, minlength=batch.rows)
    means = np.bincount(row, differences[place, column], minlength=batch.rows) / np.maximum(counts, 1)
    gains = []
    for group in np.unique(batch.groups):
        here = (batch.groups == group) & (counts > 0)
        if (here & passed).any() and (here & ~passed).any():
            gains.append(means[here & passed].mean() - means[here & ~passed].mean())
    return float(np.mean(gains)) if gains and np.isfinite(gains).all() else None


def candidates(batch: Batch, ids: Array, inputs: Mapping[str, Array], shifts: Array | None = None) -> Targets:
    """[M, k] ids as targets at the trained places of the rows; `shifts` moves those of each row."""
    trained, k = batch.predicted(batch.policy_mask), ids.shape[1]
    at, counts = np.flatnonzero(trained), batch.count(trained)
    places = at - np.repeat(batch.offsets[:-1], counts)
    if shifts is not None:
        places += np.repeat(shifts, counts)
    return Targets(ids.ravel(), np.repeat(places, k), np.cumsum([0, *(counts * k)]), inputs, per_place=k)


def teacher_batch(batch: Batch, prompts: Sequence[Array], ids: Array) -> Batch:
    """The rows as the teacher reads them: its own prompts, then the student's tokens, with [M, k] candidates."""
    own = zip(pairwise(batch.offsets.tolist()), batch.prompt_lengths.tolist(), prompts, strict=True)
    read = [np.concatenate([prompt, batch.token_ids[first + length : last]]) for (first, last), length, prompt in own]
    lengths = np.array([len(prompt) for prompt in prompts], int)
    targets = candidates(batch, ids, {}, shifts=lengths - batch.prompt_lengths)
    return Batch.of_targets(read, targets, batch.groups, lengths)


Schemas = Sequence[dict[str, Any]]
ROWS_PER_REQUEST = 16
TIMEOUT_S = 600.0
RETRIES = Retries(attempts=5, backoff=2.0)


class Teacher:
    """Gives the log-probabilities that the student learns from."""

    context_tokens: int | None = None  # a longer row is not distilled; None: any

    def prompt(self, group: Group, rollout: Rollout, conversation: Rollout | Lineage) -> Array | None:
        """The tokens that the teacher reads in place of the student's prompt; None where it has nothing to teach."""
        return conversation.turns[0].token_ids

    def logprobs(self, batch: Batch) -> Array:
        """[M] of the batch's targets."""
        raise NotImplementedError

    def weight(self, group: Group) -> float:
        """Weight of a group's tokens in the loss."""
        return 1.0

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of the step's rollouts."""
        return {}

    def rows(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], config: RunConfig) -> DistillRows:
        """The rows of a step that the student learns from this teacher."""
        return choose_rows(self, groups, advantages, config)


@dataclass(slots=True)
class SelfTeacher(Teacher):
    """The model that is trained, with a hint in its prompt."""

    model: LocalLearner | FrozenModel  # with the weights of now, or of the run's beginning
    chat: ChatFormat
    problems: Mapping[str, Problem]
    schemas_of: Callable[[Problem], Schemas]  # the tools of a problem's attempts
    config: RunConfig
    context_tokens: int | None = None
    _known: dict[tuple[str, ...], Schemas] = field(default_factory=lambda: {(): ()})  # by the tools' names
    _rendered: tuple[Array, Schemas] | None = None  # the prompt that was rendered again last

    def prompt(self, group: Group, rollout: Rollout, conversation: Rollout | Lineage) -> Array | None:
        problem = self.problems.get(group.problem_id)
        if problem is None or conversation is not rollout:  # another conversation has another prompt
            return None
        hint = choose_hint(self.config.distill.context, group, rollout, problem)
        if hint is None:
            return None
        opening = opening_of(rollout)
        return self.chat.prompt(with_text(opening, hint), self._schemas(problem, rollout, opening)).token_ids

    def _schemas(self, problem: Problem, rollout: Rollout, opening: Sequence[Message]) -> Schemas:
        """The tools with which the rollout's own prompt is rendered, token by token; its messages are on record."""
        own, names = rollout.turns[0].token_ids, rollout.tool_names
        if self._rendered is not None and np.array_equal(self._rendered[0], own):
            return self._rendered[1]
        for look in (self._known.get, lambda names: self.schemas_of(problem)):
            schemas = look(names)
            if schemas is not None and np.array_equal(self.chat.prompt(opening, schemas).token_ids, own):
                self._known[names], self._rendered = schemas, (own, schemas)
                return schemas
        raise UnsupportedError(
            f"self-distillation renders the prompt of problem {problem.id!r} again, with a hint; without one it "
            "differs from what the rollout was sampled with: its tools are not the same when it is opened again. Set "
            "distill.coefficient to 0, or name another model as distill.teacher"
        )

    def logprobs(self, batch: Batch) -> Array:
        return self.model.forward(batch)

    def weight(self, group: Group) -> float:
        return 1.0 - pass_rate(group.rollouts) if self.config.distill.phase_out else 1.0

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`hint_leak_rate`: the share of the rollouts that speak of a hint, or know an answer that no tool gave."""
        good = [(r, self.problems.get(g.problem_id)) for g in groups for r in g.rollouts if r.error is None]
        leaks = [leaks_hint(rollout, problem and problem.expect) for rollout, problem in good]
        return {"hint_leak_rate": sum(leaks) / len(leaks)} if leaks else {}


@dataclass(slots=True)
class ModelTeacher(Teacher):
    """Another model, which reads what the student reads. Its weights stay as they are."""

    model: FrozenModel
    context_tokens: int | None = None

    def logprobs(self, batch: Batch) -> Array:
        return self.model.forward(batch)


@dataclass(slots=True)
class ServerTeacher(Teacher):
    """Another model behind `palestra serve`, vLLM or another server with OpenAI's /v1/completions.

    Such a server gives the log-probabilities of a prompt's own tokens, not of any candidates, so the divergence at each
    place is that of two outcomes: the sampled token, and all others. They are at temperature 1. The server's tokenizer
    must be the student's; it is not checked. No key is sent.
    """

    url: str
    name: str

    @classmethod
    def connect(cls, url: str) -> ServerTeacher:
        """Ask the server for the name of its model."""
        found = ask(Request(f"{url.rstrip('/')}/v1/models"), RETRIES)
        try:
            return cls(url.rstrip("/"), str(found["data"][0]["id"]))
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"distill.teacher_url = {url} lists no model at /v1/models; set another") from None

    def logprobs(self, batch: Batch) -> Array:
        targets, rows = batch.targets, batch.split(batch.token_ids)
        assert targets is not None
        starts = range(0, len(rows), ROWS_PER_REQUEST)
        found = [values for first in starts for values in self._ask(rows[first : first + ROWS_PER_REQUEST])]
        places = np.split(targets.places, targets.offsets[1:-1])
        return np.concatenate([values[at] for values, at in zip(found, places, strict=True)])

    def _ask(self, rows: Sequence[Array]) -> list[Array]:
        """[T] of each row: the log-probabilities of its tokens; NaN of the first, which nothing predicts."""
        body: dict[str, Any] = {"model": self.name, "prompt": [row.tolist() for row in rows], "echo": True}
        body |= {"max_tokens": 0, "logprobs": 1, "temperature": 1.0}
        answer = ask(Request(f"{self.url}/v1/completions", body, timeout_s=TIMEOUT_S), RETRIES)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            values = [np.array(c["logprobs"]["token_logprobs"], np.float32) for c in choices]  # None becomes NaN
        except (KeyError, TypeError, ValueError):
            values = []
        if [len(value) for value in values] != [len(row) for row in rows]:
            raise ServiceError(
                f"distill.teacher_url = {self.url} does not give the log-probabilities of a prompt of token ids "
                "(/v1/completions with echo, logprobs and max_tokens=0); use palestra serve or vLLM"
            )
        return values


def teacher_of(
    config: RunConfig, learner: Learner, tokenizer: Any, environment: Environment | None, context_tokens: int | None
) -> Teacher | None:
    """The teacher that the config asks for; None while `distill.coefficient` is 0.

    `environment` has the problems of the rollouts and their tools, None where they come from elsewhere;
    `context_tokens` is the model's context length.
    """
    if not config.distill.coefficient:
        return None
    if not isinstance(learner, LocalLearner):
        raise no_top_tokens(learner)
    if config.distill.teacher_url is not None:
        return ServerTeacher.connect(config.distill.teacher_url)
    if config.distill.teacher is not None:
        options: dict[str, Any] = {"dtype": config.model.dtype, "device": str(learner.device)}
        loaded = load_model(config.distill.teacher, **options, threads=config.model.threads)
        require_same_tokens(config.distill.teacher, loaded, tokenizer, learner.vocabulary)
        frozen = FrozenModel(loaded.model, config=config, pad_token_id=loaded.tokenizer.pad_token_id or 0)
        return ModelTeacher(frozen, loaded.context_tokens)
    if environment is None:
        raise UnsupportedError(
            "self-distillation writes hints into the prompts of an agent file's or an environment's problems, and "
            "these rollouts come from elsewhere; name another model as distill.teacher, or set distill.coefficient to 0"
        )
    problems = {problem.id: problem for problem in environment.problems("train")}

    def schemas_of(problem: Problem) -> Schemas:
        return [tool.schema for tool in tools_of(environment, problem)]

    model: LocalLearner | FrozenModel = learner
    if config.distill.teacher_weights == "initial":
        model = FrozenModel.copy_of(learner.model, config=config, pad_token_id=tokenizer.pad_token_id or 0)
    return SelfTeacher(model, ChatFormat(tokenizer), problems, schemas_of, config, context_tokens)


def require_same_tokens(name: str, teacher: LoadedModel, tokenizer: Any, vocabulary: int) -> None:
    """PalestraError unless each token id means the same to both."""
    theirs, ours = teacher.tokenizer.get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sum(theirs.get(token) != i for token, i in ours.items())
        raise SettingError(
            f"distill.teacher = {name} has another tokenizer: {different} of the student's {len(ours)} tokens have "
            f"another id or none, and it has {len(theirs)}; use a teacher of the student's own model family"
        )
    if teacher.vocabulary < vocabulary:
        raise SettingError(
            f"distill.teacher = {name} has logits for {teacher.vocabulary} tokens, and the student for {vocabulary}; "
            "use a teacher whose output layer is at least as large"
        )


def no_top_tokens(learner: Learner) -> PalestraError:
    return UnsupportedError(
        f"distillation needs the model's most likely tokens, which a {type(learner).__name__} does not give; train in "
        "one process with backend: local, or set distill.coefficient to 0"
    )
