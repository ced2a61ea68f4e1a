"""What a training gives back: its model answers, with its tools."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra import Agent, EvalSuite, function_tool, measure, train_grpo
from palestra.core.errors import InputError, TrainingError
from palestra.core.files import read_jsonl
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message, Rollout
from palestra.models.loading import load_model
from palestra.policy import build
from palestra.result import GRPOTrainingResult
from palestra.runs.index import Index, palestra_home
from palestra.train.watcher import Interrupted, Watcher

PRICES = {"red lamp": 23, "blue mug": 45, "green chair": 67, "black desk": 89}


@function_tool
def price(item: str) -> int:
    """Look up the price of one item."""
    return PRICES[item]


@measure
def right_price(ctx: Any) -> bool:
    return str(ctx.expect) in ctx.final_assistant_message.text


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainingResult:
    """A training so short and slow that the model is still what it was."""
    cases = [{"input": f"What does a {item} cost?", "expect": cost} for item, cost in PRICES.items()]
    config = {
        "output_dir": str(tmp_path_factory.mktemp("runs")),
        "train.max_steps": 2,
        "train.problems_per_step": 1,
        "eval.every": 1,
        "train.learning_rate": 1e-7,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 40,
    }
    agent = Agent("clerk", "palestra/tiny", "Use the tools to answer.", [price])
    return train_grpo(agent, EvalSuite.from_records(cases, measures=[right_price]), config=config)


def ask(result: GRPOTrainingResult, prompt: str, **options: Any) -> str:
    return result.generate(prompt, temperature=0, repetition_penalty=1.0, max_new_tokens=60, **options)


def test_generate_calls_the_agents_tools_or_others_and_gives_the_answer(result: GRPOTrainingResult) -> None:
    called = []

    def price(item: str) -> int:
        """Look up the price of one item."""
        called.append(item)
        return 71

    mug = "What does a blue mug cost?"
    assert ask(result, mug) == ask(result, mug, tools=result.tools) == "That is 45."
    assert ask(result, mug, tools=[price], instructions="Use the tools.") == "That is 71."
    assert called == ["blue mug"]
    with pytest.raises(InputError, match="the schema of a tool 'weigh' has no function behind it"):
        ask(result, "Hello", tools=[{"type": "function", "function": {"name": "weigh"}}])

    async def notebook() -> str:  # a running event loop
        return ask(result, "What does a red lamp cost?")

    assert asyncio.run(notebook()) == "That is 23."


def test_generate_strips_thinking(result: GRPOTrainingResult, monkeypatch: pytest.MonkeyPatch) -> None:
    async def thinks(*_: Any) -> Rollout:
        messages = (Message("user", "2 + 2?"), Message("assistant", "<think>two and two</think>\n\nFour."))
        return Rollout("", (), messages, "answered")

    monkeypatch.setattr("palestra.rollout.converse.converse", thinks)
    assert result.generate("2 + 2?") == "Four."


def test_generate_builds_one_sampler_and_penalises_no_repetition(
    result: GRPOTrainingResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.rollout import converse as converse_module

    built, penalties = [], []
    build_policy, converse = build.build_policy, converse_module.converse

    def building(*args: Any) -> Any:
        built.append(args)
        return build_policy(*args)

    def noting(policy: Any, chat: Any, messages: Any, tools: Any, limits: Any) -> Any:
        penalties.append(limits.sampling.repetition_penalty)
        return converse(policy, chat, messages, tools, limits)

    monkeypatch.setattr(build, "build_policy", building)
    monkeypatch.setattr(converse_module, "converse", noting)
    fresh = replace(result)
    for _ in range(3):
        fresh.generate("What does a blue mug cost?", max_new_tokens=4)
    assert len(built) == 1
    assert penalties == [1.0] * 3


def test_generate_samples_from_weights_that_were_changed_in_between(result: GRPOTrainingResult) -> None:
    fresh = replace(result)
    head = fresh.model.get_output_embeddings().weight
    before, saved = fresh.generate("Hello there", temperature=0, max_new_tokens=6), head.detach().clone()
    try:
        with torch.no_grad():
            head.copy_(head.flip(0))
        assert fresh.generate("Hello there", temperature=0, max_new_tokens=6) != before
    finally:
        with torch.no_grad():
            head.copy_(saved)


def test_generate_is_repeatable_and_follows_the_seed(result: GRPOTrainingResult) -> None:
    answers = [result.generate("Hello there", temperature=2.0, max_new_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_a_run_from_python_leaves_its_report_its_evaluations_and_a_row_in_the_index(result: GRPOTrainingResult) -> None:
    run = result.run
    report = run.report()
    assert report is not None
    assert {name: report[name] for name in ("before", "after")} == json.loads(json.dumps(result.report()))
    assert [row["step"] for row in report["metrics"]] == [1, 1, 2]  # an evaluation has a row of its own
    assert report["agent"] == "clerk"
    assert report["tools"] == ["price"]
    assert "clerk" in run.report_page.read_text()
    assert run.eval_names() == ["before", 1, "after"]
    for name, scored in (("before", result.before), ("after", result.after)):
        assert [row["messages"][-1]["text"] for row in read_jsonl(run.eval_file(name))] == [
            rollout.messages[-1].text for rollout in scored.rollouts
        ]
    assert len(list(read_jsonl(run.eval_file(1)))) == len(result.before.rollouts)
    [row] = [row for row in Index(palestra_home()).rows() if row.folder == str(run.path.resolve())]
    assert (row.state, row.kind, row.name, row.reason) == ("completed", "foreground", "clerk", None)


def train_shortly(folder: Path, **more: Any) -> None:
    agent = Agent("clerk", "palestra/tiny", "Use the tools to answer.", [price])
    suite = EvalSuite.from_records([{"input": "Hi", "expect": 1}] * 4, measures=[right_price])
    config = {"output_dir": str(folder), "train.max_steps": 2, "rollout.max_new_tokens": 4, "rollout.group_size": 2}
    train_grpo(agent, suite, config=config, **more)


def only_run(parent: Path) -> tuple[RunFolder, Any]:
    """The run in a folder, and its row in the index."""
    [folder] = parent.iterdir()
    [row] = [row for row in Index(palestra_home()).rows() if row.folder == str(folder.resolve())]
    return RunFolder(folder), row


def test_ctrl_c_in_a_run_from_python_leaves_a_checkpoint_and_a_stopped_row(tmp_path: Path) -> None:
    class Impatient(Watcher):
        def advance(self, done: int, metrics: dict[str, float]) -> None:
            if "reward_mean" in metrics:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted) as raised:
        train_shortly(tmp_path, watcher=Impatient())
    run, row = only_run(tmp_path)
    assert str(raised.value).endswith(f"Go on with resume={str(run.path)!r}")
    assert raised.value.checkpoint == run.last_checkpoint() == run.step_folder(1)
    assert row.state == "stopped"


def test_a_run_from_python_that_fails_says_so_in_the_index(tmp_path: Path) -> None:
    def broken(**columns: Any) -> list[float]:
        raise RuntimeError("no such column")

    with pytest.raises(TrainingError, match="the reward function broken has failed in all of its"):
        train_shortly(tmp_path, extra_reward_funcs=[broken])
    _, row = only_run(tmp_path)
    assert row.state == "failed"
    assert "step 1: the reward function broken" in str(row.reason)


def test_the_saved_model_is_the_trained_one_at_an_absolute_path(
    result: GRPOTrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert result.save_model("model") == tmp_path / "model"
    saved = load_model(str(tmp_path / "model"), device="cpu")
    ours, theirs = result.model.state_dict(), saved.model.state_dict()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert saved.tokenizer.chat_template == result.tokenizer.chat_template


def test_a_result_is_one_line_or_html_in_a_notebook_and_knows_its_trainer(result: GRPOTrainingResult) -> None:
    text, page = repr(result), result._repr_html_()
    assert len(text) < 300
    assert all(words in text for words in ("'clerk'", "2 steps", "100.0% → 100.0% passed", str(result.run.path)))
    assert len(repr(result.outcome)) < 3000
    assert result.trainer.model is result.model
    assert json.loads(json.dumps(result.tools)) == [price.schema]
    assert result.agent.name in page
    assert str(result.run.path) in page
    assert "<script" not in page


def test_without_progress_nothing_is_printed_and_with_it_lines_where_there_is_no_terminal(
    result: GRPOTrainingResult, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = EvalSuite.from_records([{"input": "Hi", "expect": 1}], measures=[right_price])
    config = {"rollout.max_new_tokens": 2}
    suite.evaluate(result.agent, config=config, progress=False)
    assert "scoring" not in capfd.readouterr().err
    suite.evaluate(result.agent, config=config)
    assert "scoring: 1 rollouts\nscoring: done in" in capfd.readouterr().err


def test_an_agent_without_instructions_has_no_system_message(
    result: GRPOTrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no Ollama
    silent = replace(result, agent=Agent("clerk", "palestra/tiny", None, [price]), run=RunFolder(tmp_path))
    assert silent.instructions is None
    assert isinstance(ask(silent, "What does a red lamp cost?"), str)
    plain = tmp_path / "plain"
    shutil.copytree(result.model_path, plain)
    (plain / "palestra.json").unlink(missing_ok=True)
    assert "SYSTEM" not in silent.to_ollama("clerk", plain).modelfile.read_text()
