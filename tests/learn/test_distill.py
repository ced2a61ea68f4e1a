"""The embedded model learns from itself with a hint, and from a copy of itself that was trained by GRPO."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra import demo, train_grpo
from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.messages import with_text
from palestra.core.types import Array, Group, Message, Problem, Rollout, Sample, Score, Turn
from palestra.extras.distill.teacher import SelfTeacher, choose_rows
from palestra.learner.frozen import FrozenModel
from palestra.learner.local import LocalLearner
from palestra.models.chat.template import ChatFormat
from palestra.models.loading import LoadedModel
from palestra.result import GRPOTrainingResult
from palestra.rollout.hints import answer_hint
from palestra.train.update import Coefficients, update

THINGS = ("lamp", "chair", "desk", "shelf")
PROBLEMS = {name: Problem(name, f"Which number has the {name}?", str(i + 2)) for i, name in enumerate(THINGS)}
STEPS = 24


class Student:
    """The embedded model, which has practised to repeat the number of a hint."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.tokenizer, self.model, self.chat = loaded.tokenizer, loaded.model, ChatFormat(loaded.tokenizer)
        base = {"train.learning_rate": 1e-3, "rollout.temperature": 1.0, "distill.coefficient": 1.0}
        self.config = RunConfig.build(base, {"distill": {"context": ["answer"], "only": True}}).with_step_size()
        learner = LocalLearner(self.model, config=self.config)
        rows = [self.practice(problem, str(number)) for problem in PROBLEMS.values() for number in range(10)]
        loss = StepLoss.of(Batch.of(rows), Objective(loss="dapo"), max_completion_length=16)
        for _ in range(10):
            learner.forward_backward(Batch.of(rows), loss)
            learner.optim_step(2e-3, max_grad_norm=1.0)
        self.practised = {name: weight.clone() for name, weight in self.model.state_dict().items()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt(self, problem: Problem, number: str | None = None) -> Array:
        opening = [Message("user", str(problem.input))]
        hint = answer_hint(replace(problem, expect=number))
        return self.chat.prompt(opening if hint is None else with_text(opening, hint)).token_ids

    def practice(self, problem: Problem, number: str) -> Sample:
        prompt, said = self.prompt(problem, number).tolist(), self.encode(f"It is {number}.<|im_end|>")
        mask = [False] * len(prompt) + [True] * len(said)
        return Sample([*prompt, *said], mask, [False] * len(mask), [0.0] * len(mask), 1.0)  # type: ignore[arg-type]

    def wrong(self, problem: Problem, number: str) -> Rollout:
        prompt, said = Turn("template", self.prompt(problem)), self.encode(f"It is {number}.<|im_end|>")
        turns = (prompt, Turn("model", said, [-0.1] * len(said), 0, "stop"))  # type: ignore[arg-type]
        messages = (Message("user", str(problem.input)), Message("assistant", f"It is {number}."))
        return Rollout(problem.id, turns, messages, "answered", scores={"right": Score(0.0, False)})

    @torch.no_grad()
    def answers(self, *, hinted: bool = False) -> list[str]:
        found = []
        for problem in PROBLEMS.values():
            prompt = self.prompt(problem, problem.expect if hinted else None)
            logits = self.model(torch.tensor([[*prompt.tolist(), *self.encode("It is ")]])).logits[0, -1]
            found.append(self.tokenizer.decode([int(logits.argmax())]))
        return found

    def distil(self, **distill: Any) -> None:
        """From failed rollouts alone."""
        self.model.load_state_dict(self.practised)
        config = self.config.with_settings({f"distill.{name}": value for name, value in distill.items()})
        learner = LocalLearner(self.model, config=config)
        frozen = config.distill.teacher_weights == "initial"
        scorer = FrozenModel.copy_of(self.model, config=config) if frozen else learner
        teacher = SelfTeacher(scorer, self.chat, PROBLEMS, lambda problem: (), config)
        groups = [Group(p.id, tuple(self.wrong(p, number) for number in "90")) for p in PROBLEMS.values()]
        no_advantages = [[0.0] * 2] * len(groups)
        for _ in range(STEPS):
            rows = choose_rows(teacher, groups, no_advantages, config)
            update(learner, rows.batch.part(0, 0), config, Coefficients(5e-4, 0.0, 0.0), 0, distill=rows)


@pytest.mark.parametrize(
    "distill",
    [
        pytest.param({"teacher_weights": "initial"}, id="initial"),
        pytest.param({"divergence": "jsd"}, id="jsd", marks=pytest.mark.slow("make test-slow learns by both")),
    ],
)
def test_a_model_that_can_use_a_hint_learns_to_do_without(student: Student, distill: dict[str, Any]) -> None:
    expected = [problem.expect for problem in PROBLEMS.values()]
    student.model.load_state_dict(student.practised)
    assert student.answers(hinted=True) == expected
    assert not set(student.answers()) & set(expected)
    student.distil(**distill)
    assert student.answers() == expected


@pytest.fixture(scope="module")
def student(_loaded_tiny: LoadedModel) -> Student:
    import copy

    return Student(replace(_loaded_tiny, model=copy.deepcopy(_loaded_tiny.model)))


SHORT = {"train.problems_per_step": 8, "train.scheduler": "constant", "eval.cases": 24}


def train(folder: Path, *layers: dict[str, Any]) -> GRPOTrainingResult:
    config = RunConfig.build(demo.config, SHORT, *layers, {"output_dir": str(folder)})
    return train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out)


@pytest.mark.slow("make test-slow trains a teacher first")
def test_a_model_learns_from_a_better_one_without_rewards(tmp_path: Path) -> None:
    teacher = train(tmp_path / "teacher", {"train.max_steps": 8})
    distill = {"coefficient": 1.0, "only": True, "teacher": str(teacher.model_path)}
    student = train(tmp_path / "student", {"train.max_steps": 8, "distill": distill})
    assert student.before.pass_rate.rate < 0.5
    assert student.after.pass_rate.rate > 0.75
    assert student.metrics[0]["teacher_gain"] > 0.1
    assert student.metrics[-1]["distill_divergence"] < 0.3 * student.metrics[0]["distill_divergence"]
