"""Distillation of a step: which tokens, which teacher log-probabilities and weights, and what the update does."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import ADD_SCHEMA, ANSWER_TEXT, CALL_TEXT, ScriptedPolicy, add, group, rollout, sample
from loop_fakes import make_loop
from scripted import ScriptedEnvironment
from small_learner import KeepsGradients

from palestra import demo, train_grpo
from palestra.algo.batch import Batch
from palestra.core.config import RunConfig
from palestra.core.errors import ServiceError, SettingError, UnsupportedError
from palestra.core.messages import with_text
from palestra.core.types import Group, Message, Problem, SamplingParams, Score
from palestra.extras.distill.loss import TEACHER, WEIGHT
from palestra.extras.distill.teacher import (
    DistillRows,
    ModelTeacher,
    SelfTeacher,
    ServerTeacher,
    candidates,
    choose_rows,
    require_same_tokens,
    teacher_batch,
    teacher_gain,
    teacher_of,
)
from palestra.learner.frozen import FrozenModel
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.models.chat.template import ChatFormat
from palestra.models.loading import LoadedModel
from palestra.rollout.agent_loop import AttemptLimits, token_speakers
from palestra.rollout.collect import AgentLoop, Collector
from palestra.rollout.hints import answer_hint, choose_hint, feedback_hint, opening_of, sibling_hint
from palestra.servers.openai.inference import inference_app, load_completer
from palestra.train.batch import to_batch
from palestra.train.update import Coefficients, update

PROBLEMS = [Problem("sum", "What is 2 + 3?", "5"), Problem("open", "What is 1 + 1?")]
K = 4


def settings(**distill: Any) -> RunConfig:
    base = {"train.learning_rate": 1e-3, "rollout.max_new_tokens": 64, "rollout.temperature": 0.8}
    return RunConfig.build(base, {"distill": {"coefficient": 0.5, "top_k": K} | distill}).with_step_size()


class Sums(ScriptedEnvironment):
    def problems(self, split: str) -> Sequence[Problem]:
        return PROBLEMS


def play(tokenizer: Any, problem: Problem, texts: Sequence[Sequence[str]], rights: Sequence[bool]) -> Group:
    """A group by our agent loop, whose rollouts say these texts, turn by turn, with these verdicts."""
    chat, found = ChatFormat(tokenizer), []
    for said, right in zip(texts, rights, strict=True):
        policy = ScriptedPolicy(tokenizer, said)
        limits = AttemptLimits(SamplingParams(200, stop_token_ids=chat.stop_token_ids))
        collector = Collector(Sums(), AgentLoop(limits, token_speakers(policy, chat)))
        [one] = asyncio.run(collector.collect([problem], 1, ["0"]))
        score = Score(float(right), right, "" if right else "the sum is 5, not 6")
        found.append(replace(one.rollouts[0], scores={"right": score}, reward=float(right)))
    return Group(problem.id, tuple(found))


@pytest.fixture
def mixed(tiny_tokenizer: Any) -> Group:
    """One rollout that passed with a tool call, and two that failed."""
    wrong = ["It is 6.<|im_end|>"]
    return play(tiny_tokenizer, PROBLEMS[0], [[CALL_TEXT, ANSWER_TEXT], wrong, wrong], [True, False, False])


def self_teacher(loaded: LoadedModel, config: RunConfig) -> tuple[LocalLearner, SelfTeacher]:
    learner = LocalLearner(loaded.model, config=config)
    teacher = teacher_of(config, learner, loaded.tokenizer, Sums(), loaded.context_tokens)
    assert isinstance(teacher, SelfTeacher)
    return learner, teacher


@pytest.fixture
def student(tiny: LoadedModel) -> tuple[LocalLearner, SelfTeacher]:
    return self_teacher(tiny, settings())


def rows_of(teacher: Any, config: RunConfig, *groups: Group) -> DistillRows:
    return choose_rows(teacher, groups, [[0.0] * len(g.rollouts) for g in groups], config)


def dense(model: Any, token_ids: np.ndarray, temperature: float = 0.8) -> np.ndarray:
    """[T, V] log-probabilities of the next token after each token."""
    with torch.no_grad():
        logits = model(torch.tensor(np.asarray(token_ids, np.int64)[None])).logits[0]
    return torch.log_softmax(logits / temperature, -1).numpy()


def test_hints_come_in_the_configured_order_and_the_first_that_there_is_is_used(mixed: Group) -> None:
    passed, failed = mixed.rollouts[:2]
    everything = ["sibling", "feedback", "answer"]
    hint = choose_hint(everything, mixed, failed, PROBLEMS[0])  # type: ignore[arg-type]
    assert hint == sibling_hint(mixed, failed)
    assert "you call add(a=2, b=3)\nresult of add: 5\nyou: It is 5." in str(hint)
    assert sibling_hint(mixed, passed) is None, "it is no example for itself"
    alone = Group("sum", mixed.rollouts[1:])
    assert "- right: the sum is 5, not 6" in str(choose_hint(everything, alone, failed, PROBLEMS[0]))  # type: ignore[arg-type]
    assert choose_hint(["answer", "sibling"], mixed, failed, PROBLEMS[0]) == answer_hint(PROBLEMS[0])
    assert choose_hint(everything, mixed, passed, PROBLEMS[1]) is None  # type: ignore[arg-type]


def test_reasons_of_measures_that_passed_failed_to_run_or_do_not_count_are_no_feedback() -> None:
    scores = {
        "passed": Score(1.0, True, "well done"),
        "broken": Score(0.0, False, "away", error=True),
        "witness": Score(0.0, False, "too long", counts=False),
        "silent": Score(0.0, False),
    }
    assert feedback_hint(rollout(0.0, scores=scores)) is None
    assert "too short" in str(feedback_hint(rollout(0.0, scores=scores | {"length": Score(0.0, None, "too short")})))


def test_a_hint_is_added_to_the_last_message_of_the_user_before_the_models_first_message() -> None:
    system, user = Message("system", "Use tools."), Message("user", "What?")
    assert with_text([system, user], "It is 5.") == [system, Message("user", "What?\n\nIt is 5.")]
    assert with_text([system], "It is 5.") == [system, Message("user", "It is 5.")]
    shown = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "2 + 3?"))  # an example
    assert opening_of(rollout(messages=(*shown, Message("assistant", "5")))) == shown


def test_targets_are_the_students_candidates_with_the_hinted_models_log_probabilities(tiny, mixed, student) -> None:
    config, (learner, teacher), chat = settings(), student, ChatFormat(tiny.tokenizer)
    [(batch, loss)] = rows_of(teacher, config, mixed).parts(learner)
    targets = batch.targets
    assert targets is not None
    assert batch.rows == 3
    first = 0
    for i, attempt in enumerate(mixed.rollouts):
        ids = np.concatenate([turn.token_ids for turn in attempt.turns])
        trained = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in attempt.turns])
        places = np.flatnonzero(trained)
        ours = dense(tiny.model, ids)[places - 1]
        expected = np.argsort(-ours, axis=-1)[:, :K]
        hint = choose_hint(config.distill.context, mixed, attempt, PROBLEMS[0])
        assert hint is not None
        prompt = chat.prompt(with_text(opening_of(attempt), hint), [add.schema]).token_ids
        own_prompt = len(attempt.turns[0].token_ids)
        read = np.concatenate([prompt, ids[own_prompt:]])
        theirs = dense(tiny.model, read)[places - 1 + len(prompt) - own_prompt]
        part = slice(first, first + len(places) * K)
        assert targets.ids[part].tolist() == expected.ravel().tolist()
        assert targets.places[part].tolist() == np.repeat(places, K).tolist()
        np.testing.assert_allclose(
            targets.inputs[TEACHER][part], np.take_along_axis(theirs, expected, -1).ravel(), atol=1e-4
        )
        np.testing.assert_allclose(targets.inputs[WEIGHT][part], 2 / 3)  # a third of the group passed
        assert targets.offsets[i] == first
        first = part.stop
    assert first == len(targets.ids)
    assert (loss.candidates, loss.coefficient, loss.tail) == (K, 0.5, True)
    assert loss.places_total == first / K


def test_solved_groups_teach_nothing_unless_phasing_out_is_off(tiny: LoadedModel, mixed: Group, student: Any) -> None:
    solved = Group("sum", tuple(replace(r, scores={"right": Score(1.0, True)}) for r in mixed.rollouts))
    failed = Group("sum", mixed.rollouts[1:])
    learner, teacher = student
    rows = rows_of(teacher, settings(), solved, mixed, failed)
    assert rows.batch.groups.tolist() == [1, 1, 1, 2, 2]
    np.testing.assert_allclose(rows.weights, [2 / 3] * 3 + [1.0] * 2)
    assert rows.metrics["distill_rollouts"] == 5
    every = sum(r.sampled_tokens for g in (solved, mixed, failed) for r in g.rollouts)
    assert rows.parts(learner)[0][1].places_total == every, "tokens that are not distilled count in the mean"

    always = settings(phase_out=False)
    rows = rows_of(self_teacher(tiny, always)[1], always, solved)
    assert rows.weights.tolist() == [1.0] * 3


def test_rollouts_without_a_hint_failed_ones_and_those_that_are_too_long_are_left_out(mixed, student) -> None:
    no_hint = Group("open", (replace(mixed.rollouts[0], problem_id="open"),))
    broken = group(0.0, problem="sum", error="boom")
    teacher = student[1]
    assert rows_of(teacher, settings(), no_hint, broken).batch.rows == 0
    teacher.context_tokens = 80
    rows = rows_of(teacher, settings(), mixed)
    assert rows.metrics["distill_too_long"] == 3 - rows.batch.rows > 0


def test_tools_are_asked_for_once_and_again_where_they_do_not_render_the_prompt(tiny, mixed) -> None:
    config, asked = settings(), []

    def schemas_of(problem: Problem) -> Sequence[dict[str, Any]]:
        asked.append(problem.id)
        return [ADD_SCHEMA] if len(asked) > 1 else [add.schema]

    learner = LocalLearner(tiny.model, config=config)
    problems = {problem.id: problem for problem in PROBLEMS}
    teacher = SelfTeacher(learner, ChatFormat(tiny.tokenizer), problems, schemas_of, config)
    rows_of(teacher, config, mixed, mixed)
    assert asked == ["sum"]
    other = play(tiny.tokenizer, replace(PROBLEMS[1], expect="2"), [["It is 2.<|im_end|>"]], [False])
    rows_of(teacher, config, other)
    assert asked == ["sum"], "another problem with the same tools"
    chat = ChatFormat(tiny.tokenizer)
    failed = mixed.rollouts[1]
    foreign = Group("sum", (replace(failed, turns=(chat.prompt(opening_of(failed)), *failed.turns[1:])),))
    with pytest.raises(UnsupportedError, match="distill"):
        rows_of(teacher, config, foreign)
    assert asked == ["sum", "sum"]


def test_one_optimizer_step_has_the_gradients_of_both_losses(tiny: LoadedModel, mixed: Group, student: Any) -> None:
    config = settings()
    rows = rows_of(student[1], config, mixed)
    policy = to_batch([mixed], [[1.0, -0.5, -0.5]], mask_truncated=True)
    found = []
    for batch, distill in ((policy, None), (policy.part(0, 0), rows), (policy, rows)):
        one = KeepsGradients(tiny.model, config=config)
        metrics = update(one, batch, config, Coefficients(1e-3, echo=0.0, entropy=0.0), 3, distill=distill)
        [gradient] = one.taken
        found.append((gradient, metrics))
    (alone, policy_only), (taught, distilled), (together, combined) = found
    torch.testing.assert_close(together, alone + taught, rtol=1e-4, atol=1e-7)
    assert combined["loss"] == pytest.approx(policy_only["loss"] + distilled["loss"])
    assert combined["policy_loss"] == pytest.approx(policy_only["policy_loss"])
    assert combined["distill_loss"] == pytest.approx(distilled["loss"])
    assert combined["tokens_distilled"] == sum(r.sampled_tokens for r in mixed.rollouts)
    assert "policy_loss" not in distilled


def test_the_gain_of_a_teacher_compares_passed_with_failed_rows_of_one_group() -> None:
    rows = [sample(completion, group=g) for g, completion in ((0, (3, 4)), (0, (3, 5)), (0, (9, 4)), (1, (3, 4)))]
    ids = np.array([[3, 4], [4, 5], [3, 4], [4, 5], [3, 4], [4, 5], [3, 4], [4, 5]])
    differences = np.array([[1.0, 9], [3, 9], [0, 9], [9, -1], [9, 9], [-4, 9], [7, 7], [7, 7]])
    passed = np.array([True, True, False, True])
    found = teacher_gain(Batch.of(rows), passed, ids, differences)
    assert found == pytest.approx(((1 + 3) / 2 + (0 - 1) / 2) / 2 - (-4)), "token 9 is no candidate"
    assert teacher_gain(Batch.of(rows[:2]), passed[:2], ids[:4], differences[:4]) is None


def test_minibatches_split_the_distillation_too(mixed: Group, student: Any) -> None:
    learner, teacher = student
    both = (settings(), settings().with_settings({"train.minibatches": 2}))
    whole, parts = (rows_of(teacher, config, mixed).parts(learner) for config in both)
    assert [batch.rows for batch, _ in parts] == [2, 1]
    ids = np.concatenate([batch.targets.ids for batch, _ in parts if batch.targets is not None])
    assert whole[0][0].targets is not None
    assert ids.tolist() == whole[0][0].targets.ids.tolist()
    assert parts[0][1].places_total == whole[0][1].places_total / 2


def test_a_teacher_with_the_initial_weights_stays_where_it_is(tiny: LoadedModel, mixed: Group) -> None:
    config = settings(teacher_weights="initial")
    learner, teacher = self_teacher(tiny, config)
    rows = rows_of(teacher, config, mixed)
    [(batch, loss)] = rows.parts(learner)
    assert batch.targets is not None
    now = self_teacher(tiny, settings())[1]
    read = teacher_batch(rows.batch, rows.prompts, batch.targets.ids.reshape(-1, K))
    np.testing.assert_allclose(teacher.logprobs(read), now.logprobs(read), atol=1e-5)
    before = teacher.logprobs(read)
    learner.forward_backward(batch, loss)
    learner.optim_step(1e-2, max_grad_norm=1.0)
    np.testing.assert_array_equal(teacher.logprobs(read), before)
    assert not np.allclose(now.logprobs(read), before, atol=1e-2)


def test_a_copy_of_a_model_with_an_adapter_shares_the_base(tiny: LoadedModel) -> None:
    config = settings(teacher_weights="initial").with_settings({"lora.r": 4})
    model = add_lora(tiny.model, config.lora)
    copied = FrozenModel.copy_of(model, config=config).model
    pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
    assert all((ours is theirs) == (not ours.requires_grad) for ours, theirs in pairs)
    assert any(ours is not theirs for ours, theirs in pairs)
    assert all(not theirs.requires_grad for _, theirs in pairs)


def test_a_model_learns_from_another_one(tiny: LoadedModel, mixed: Group) -> None:
    config = settings(teacher="palestra/tiny", coefficient=1.0)
    with torch.no_grad():
        for p in tiny.model.parameters():
            p.mul_(1.0 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    learner = LocalLearner(tiny.model, config=config)
    teacher = teacher_of(config, learner, tiny.tokenizer, None, None)
    assert isinstance(teacher, ModelTeacher)
    assert rows_of(teacher, config, mixed).weights.tolist() == [1.0] * 3, "phasing out is for hints"
    empty = rows_of(teacher, config, mixed).batch.part(0, 0)
    found = []
    for _ in range(8):
        rows = rows_of(teacher, config, mixed)
        metrics = update(learner, empty, config, Coefficients(1e-3, echo=0.0, entropy=0.0), 3, distill=rows)
        found.append(metrics["distill_divergence"])
    assert found[-1] < 0.3 * found[0]


def test_a_server_scores_the_sampled_tokens_against_all_others(tiny: LoadedModel, mixed: Group, serve: Any) -> None:
    config = RunConfig.build(
        {"rollout.temperature": 1.0, "distill.coefficient": 1.0, "train.learning_rate": 1e-3},
        {"distill.teacher_url": serve(inference_app(load_completer("palestra/tiny")))},
    ).with_step_size()
    learner = LocalLearner(tiny.model, config=config)
    teacher = teacher_of(config, learner, tiny.tokenizer, None, None)
    assert isinstance(teacher, ServerTeacher)
    rows = rows_of(teacher, config, mixed)
    [(batch, loss)] = rows.parts(learner)
    assert batch.targets is not None
    assert (loss.candidates, loss.tail) == (1, True)
    sampled = [t.token_ids for r in mixed.rollouts for t in r.turns if t.maker == "model"]
    assert batch.targets.ids.tolist() == np.concatenate(sampled).tolist()
    expected = learner.forward(batch)  # the same weights
    np.testing.assert_allclose(batch.targets.inputs[TEACHER], expected, atol=1e-4)
    assert learner.forward_backward(batch, loss).metrics()["distill_divergence"] == pytest.approx(0.0, abs=1e-6)


def test_a_server_without_prompt_logprobs_is_rejected(mixed: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [{"data": []}, {"choices": [{"index": 0, "logprobs": None}]}]
    monkeypatch.setattr("palestra.extras.distill.teacher.ask", lambda request, retries: answers.pop(0))
    with pytest.raises(ServiceError, match="models"):
        ServerTeacher.connect("http://127.0.0.1:1")
    batch = to_batch([mixed], [[0.0] * 3], mask_truncated=True)
    batch.targets = candidates(batch, np.zeros((35, 1), int), {})
    with pytest.raises(ServiceError, match="echo"):
        ServerTeacher("http://127.0.0.1:1", "m").logprobs(batch)


def test_a_teacher_with_other_tokens_is_rejected(tiny: LoadedModel) -> None:
    require_same_tokens("same", tiny, tiny.tokenizer, tiny.vocabulary)
    with pytest.raises(SettingError, match="output layer"):
        require_same_tokens("small", tiny, tiny.tokenizer, tiny.vocabulary + 1)

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {token: i + 1 for token, i in tiny.tokenizer.get_vocab().items()}

    with pytest.raises(SettingError, match="tokenizer"):
        require_same_tokens("other", tiny, Other(), tiny.vocabulary)


def test_learners_and_sources_that_cannot_be_distilled_are_rejected(tiny: LoadedModel) -> None:
    learner = LocalLearner(tiny.model, config=settings())
    for wrong, word in ((make_loop().learner, "FakeLearner"), (learner, r"distill\.teacher")):
        with pytest.raises(UnsupportedError, match=word):
            teacher_of(settings(), wrong, tiny.tokenizer, None, None)
    assert teacher_of(RunConfig(), make_loop().learner, tiny.tokenizer, None, None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"distill.only": True},
        {"distill": {"coefficient": 1, "only": True}, "echo.coefficient": 0.1},
        {"distill": {"teacher": "palestra/tiny", "context": ["answer"]}},
        {"distill": {"teacher": "palestra/tiny", "teacher_url": "http://127.0.0.1:1"}},
        {"distill": {"teacher_url": "http://127.0.0.1:1", "top_k": 3}, "rollout.temperature": 1},
        {"distill.teacher_url": "http://127.0.0.1:1"},
        {"distill": {"teacher": "palestra/tiny", "teacher_weights": "initial"}},
        {"distill.context": []},
        {"distill.context": ["gold"]},
        {"distill.top_k": 100_000},
    ],
)
def test_settings_without_effect_or_out_of_bounds_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"distill|echo"):
        RunConfig.build(wrong)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        ({}, {"policy_loss", "distill_loss", "hint_leak_rate"}),
        ({"distill.only": True, "distill.context": ["answer"]}, {"distill_loss", "hint_leak_rate"}),
        ({"distill.only": True, "distill.teacher": "palestra/tiny"}, {"distill_loss"}),
    ],
)
def test_a_run_distils_in_every_step(tmp_path: Path, layer: dict[str, Any], names: set[str]) -> None:
    short = {"train.max_steps": 2, "train.problems_per_step": 2, "rollout.group_size": 4, "eval.cases": 2}
    config = RunConfig.build(demo.config, short, {"distill.coefficient": 1.0, "output_dir": str(tmp_path)}, layer)
    result = train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out)
    assert len(result.metrics) == 2
    for row in result.metrics:
        assert names == {"policy_loss", "distill_loss", "hint_leak_rate"} & row.keys()
        assert row["update_scale"] == 1.0
        assert row["tokens_distilled"] > 0
    expected = 0.0 if "distill.teacher" in layer else None
    assert expected is None or result.metrics[0]["distill_loss"] == pytest.approx(expected, abs=1e-6)
