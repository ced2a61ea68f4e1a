"""Replay: which successes are stored and learned again, its gradient, and going on exactly."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import agent, group, rollout, suite, tool_result
from loop_fakes import make_loop
from safetensors.torch import load_file
from small_learner import KeepsGradients, build, settings
from torch.nn.functional import cross_entropy

from palestra import measure, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.types import Group, Message, Rollout
from palestra.learner.local import LocalLearner
from palestra.train.batch import to_batch
from palestra.train.checkpoint import read_checkpoint
from palestra.train.demonstrations import DemonstrationStore, as_demonstrations
from palestra.train.loop import Training
from palestra.train.replay import Replay, ReplayRows, replay_for
from palestra.train.schedule import Coefficients
from palestra.train.step_trainer import _resolve
from palestra.train.update import update


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    return Replay(DemonstrationStore(tmp_path / "demonstrations.jsonl"), seed=0)


def passed(problem: str, *ids: int, **fields: Any) -> Group:
    return Group(problem, (rollout(1.0, problem=problem, ids=ids or (3, 4, 5), **fields),))


def stored(replay: Replay) -> list[tuple[str, list[int]]]:
    return [(r.problem_id, r.turns[1].token_ids.tolist()) for r in replay.store.rollouts]


def test_a_few_successes_of_each_problem_are_stored_and_none_twice(replay: Replay) -> None:
    replay.add([passed("a", 3), passed("a", 3), passed("b", 3), group(0.0, 0.5, problem="c")])
    replay.add([passed("a", 3), passed("a", 4), passed("a", 5)])
    assert stored(replay) == [("a", [3]), ("b", [3]), ("a", [4])]
    assert all(r.advantages is not None and r.advantages.all() for r in replay.store.rollouts)


def test_guesses_and_what_was_cut_off_are_not_stored_and_the_number_is_bounded(replay: Replay) -> None:
    tools: dict[str, Any] = {"tool_names": ("add",)}
    said = (Message("user", "?"), Message("assistant", "It is 2."))
    replay.add([passed("guess", messages=said, **tools), passed("cut", stop="truncated"), passed("failed", error="x")])
    replay.add([passed("called", messages=said, tool_results=(tool_result(),), **tools)])
    assert [name for name, _ in stored(replay)] == ["called"]
    replay.max_stored = 3
    for first in range(4):
        replay.add([passed(f"{first}-{i}") for i in range(2)])
    assert [name for name, _ in stored(replay)] == ["called", "0-0", "0-1"]


def test_unsolved_problems_of_the_step_come_first_and_others_by_seed_and_step(replay: Replay) -> None:
    replay.add([passed(name) for name in "abcdef"])
    groups = [group(0.0, 0.0, problem="e"), group(0.0, 1.0, problem="a")]
    chosen = [[r.problem_id for r in replay.choose(groups, step, 4)] for step in range(8)]
    assert all(names[0] == "e" and len(set(names)) == 4 for names in chosen)
    assert len({tuple(names) for names in chosen}) > 4
    assert chosen == [[r.problem_id for r in replay.choose(groups, step, 4)] for step in range(8)]
    assert len(replay.choose(groups, 0, 100)) == 6
    assert replay.choose([group(1.0, 1.0, problem="e")], 0, 4) == [], "nothing to learn"


def by_hand(rollouts: Sequence[Rollout]) -> tuple[float, torch.Tensor]:
    """The mean cross-entropy of the sampled tokens at temperature 1, and its gradient."""
    model, losses = build(), []
    for one in rollouts:
        prompt, said = (turn.token_ids.tolist() for turn in one.turns)
        logits = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
        losses.append(cross_entropy(logits, torch.tensor(said), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("budget", [8, 16384])
def test_a_step_has_the_gradient_of_the_policy_loss_and_that_of_the_cross_entropy(budget: int) -> None:
    config = settings(rollout={"temperature": 0.7}, train={"tokens_per_micro_batch": budget})
    successes = [*as_demonstrations(rollout(ids=(9, 8, 7, 6))), *as_demonstrations(rollout(ids=(9,), prompt=(5, 6, 7)))]
    policy = to_batch([group(1.0, 0.0, ids=(3, 4))], [[1.0, -1.0]], mask_truncated=True)
    found = []
    for batch, rows in (
        (policy, None),
        (policy, ReplayRows(successes, 0.3)),
        (policy.part(0, 0), ReplayRows(successes, 2.0)),
    ):
        learner = KeepsGradients(build(), config=config)
        metrics = update(learner, batch, config, Coefficients(1e-3, echo=0.0, entropy=0.0), 0, replay=rows)
        [gradient] = learner.taken
        found.append((gradient, metrics))
    (alone, without), (together, both), (only, replayed) = found
    loss, expected = by_hand(successes)
    torch.testing.assert_close(together, alone + 0.3 * expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(only, 2.0 * expected, rtol=1e-4, atol=1e-6)
    assert both["replay_loss"] == pytest.approx(loss, rel=1e-5)
    assert both["loss"] == pytest.approx(without["loss"] + 0.3 * loss, rel=1e-5)
    assert (both["replay_rollouts"], both["policy_loss"]) == (2.0, without["policy_loss"])
    assert both["entropy"] == without["entropy"], "metrics of sampled tokens are those of the policy loss"
    assert "policy_loss" not in replayed


def test_minibatches_split_what_is_replayed(replay: Replay) -> None:
    replay.add([passed(name) for name in "abc"])
    parts = ReplayRows(replay.store.rollouts, 0.5).parts(2)
    assert [batch.rows for batch, _ in parts] == [2, 1]
    assert [loss.tokens_total for _, loss in parts] == [6, 3]


# In a run: groups without signal, of which some problems always pass.

QUICK = {
    "model.threads": 1, "train.problems_per_step": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 24,
    "train.max_steps": 4, "checkpoint.every": 1, "checkpoint.keep_last": 50, "stages.sft_batch": 2,
    "stages.sft_epochs": 1, "train.learning_rate": 1e-4, "train.max_rollbacks": 0, "train.refill_limit": 0,
}  # fmt: skip


@measure
def says_a_known_word(ctx: Any) -> bool:
    return bool(ctx.final_assistant_message.text) and ctx.expect in ("red", "blue", "pink", "grey")


def run(folder: Path, weight: float = 0.5, resume: Any = None, **more: Any) -> RunFolder:
    words = "red green blue white pink black grey brown".split()
    result = train_grpo(
        agent(tools=()),
        suite(*({"input": f"Say {word}.", "expect": word} for word in words)),
        [says_a_known_word],
        config=QUICK | {"train.replay": weight} | more,
        held_out=0.25,
        progress=False,
        folder=folder,
        resume=resume,
    )
    return result.run


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.model / "model.safetensors")


def test_a_run_learns_from_successes_it_has_stored(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    rows = [row for row in done.metrics() if "reward_mean" in row]
    assert "replay_loss" not in rows[0]
    replayed = [row for row in rows if "replay_loss" in row]
    assert replayed
    assert all(row["replay_rollouts"] >= 1 and row["update_scale"] == 1.0 for row in replayed)
    count = len(done.demonstrations_file.read_text().splitlines())
    assert read_checkpoint(done.step_folder(4)).stored == count > 0

    none = run(tmp_path / "none", 0.0)
    assert not none.demonstrations_file.exists()
    assert not any(name.startswith("replay") for row in none.metrics() for name in row)
    assert any(not torch.equal(weight, weights(done)[name]) for name, weight in weights(none).items())


@pytest.fixture
def sft(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run that begins with two demonstrations."""
    said = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "It is red."}]
    traces = tmp_path / "traces.jsonl"
    traces.write_text(2 * (json.dumps({"messages": said}) + "\n"))
    return {"stages.plan": "sft,grpo", "stages.traces": str(traces)}


def require_same(one: RunFolder, other: RunFolder) -> None:
    """Both runs have the same weights, and have stored the same."""
    for name, weight in weights(one).items():
        assert torch.equal(weight, weights(other)[name]), name
    kept = [[json.loads(line)["turns"] for line in run.demonstrations_file.open()] for run in (one, other)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("plan", "step"), [("grpo", 1), ("grpo", 2), ("sft,grpo", 1), ("sft,grpo", 2)])
def test_a_resumed_run_replays_the_same(tmp_path: Path, sft: dict[str, Any], plan: str, step: int) -> None:
    more = sft if "sft" in plan else {}
    whole, again = (run(tmp_path / name, **more) for name in ("whole", "again"))
    run(again.path, resume=Resume(again.path, checkpoint=str(step)), **more)
    require_same(whole, again)
    assert any("replay_loss" in row for row in again.metrics())


def test_a_run_that_was_interrupted_between_its_stages_keeps_its_demonstrations(tmp_path, sft, monkeypatch) -> None:
    whole, step = run(tmp_path / "whole", **sft), Training.step

    def interrupted(training: Training) -> dict[str, float]:
        if training.state.stage:
            raise KeyboardInterrupt
        return step(training)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "again", **sft)
    require_same(whole, run(tmp_path / "again", resume=Resume(tmp_path / "again"), **sft))


def test_what_cannot_replay_is_refused(tmp_path: Path) -> None:
    store = DemonstrationStore(tmp_path / "x.jsonl")
    local = LocalLearner(build(), config=settings())
    assert replay_for(0.5, local, ["sft", "grpo"], store, 0).store is store
    for learner, plan, word in ((make_loop().learner, "grpo", "FakeLearner"), (local, "sft", r"stages\.plan")):
        with pytest.raises(PalestraError, match=word):
            replay_for(0.5, learner, [plan], store, 0)
    for wrong in ({}, {"distill": {"coefficient": 1, "only": True}}):
        with pytest.raises(SettingError, match=r"train\.replay"):
            _resolve(RunConfig.build(wrong | {"train.replay": 0.5}))
