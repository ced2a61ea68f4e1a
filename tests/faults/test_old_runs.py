"""Run folders and checkpoints of Palestra 0.1 go on; those of a later version are refused with a sentence."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palestra import Agent, EvalSuite, measure, train_grpo
from palestra.core.errors import UnreadableFileError, UnsupportedError
from palestra.core.run_folder import RunFolder
from palestra.envs.suite_env import SuiteEnvironment
from palestra.train.checkpoint import TrainState, read_checkpoint
from palestra.train.group_source import draw

QUESTIONS = [f"What is {n} + {n}?" for n in range(10)]
CONFIG = """
seed: 3
output_dir: runs
model: {name: palestra/tiny, dtype: auto, device: auto, gradient_checkpointing: false, master_weights: false,
        engine: auto, kv_memory_gib: 0.05}
train: {learning_rate: 1.0e-09, max_steps: 4, problems_per_step: 2, target_entropy: 9.0, filter_equal_groups: false,
        mask_truncated: false}
rollout: {group_size: 2, temperature: 1.0, max_new_tokens: 8, max_tool_rounds: 5}
eval: {cases: 1}
checkpoint: {every: 1, keep_last: 2, keep_best: true}
"""


@measure
def vowels(ctx: Any) -> float:
    text = ctx.final_assistant_message.text
    return sum(text.count(letter) for letter in "aeiou") / max(len(text), 1)


SUITE = EvalSuite.from_records([{"input": text, "expect": ""} for text in QUESTIONS], measures=[vowels])
AGENT = Agent("clerk", "palestra/tiny", "Answer.")


def write_manifest(checkpoint: Path) -> None:
    files = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sums[path.name]} for path in files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def write_checkpoint(checkpoint: Path, model: Any) -> None:
    """As version 0.1 wrote it: the learner's own counters in learner.pt, a bare cursor in state.json."""
    checkpoint.mkdir(parents=True)
    with torch.no_grad():  # trained meanwhile
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(checkpoint)
    groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
    adamw = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    learner = {
        "version": 2,
        "steps": 2,
        "entropy_coefficient": 0.25,
        "optimizer": {"adamw": adamw.state_dict(), "masters": []},
        "random": {"cpu": torch.get_rng_state(), "cuda": []},
    }
    torch.save(learner, checkpoint / "learner.pt")
    state = {"step": 2, "cursor": 4, "policy_version": 2, "best_reward": 0.5, "best_step": 1}
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)


@pytest.fixture
def old_run(tmp_path: Path, tiny: Any) -> RunFolder:
    """A run of version 0.1 that was killed in its third step."""
    run = RunFolder(tmp_path / "clerk-20260131-101500")
    run.path.mkdir()
    record = {"name": "clerk", "created": "20260131-101500", "source": None, "agent": "clerk", "tools": []}
    run.record_file.write_text(json.dumps(record))
    run.config_file.write_text(CONFIG)
    run.metrics_file.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in (1, 2, 3)))
    run.rollouts_file.write_text("".join(f'{{"step": {step}, "problem_id": "x"}}\n' for step in (1, 2, 3)))
    write_checkpoint(run.step_folder(2), tiny.model)
    return run


def test_a_checkpoint_of_the_first_version_is_read(old_run: RunFolder) -> None:
    assert read_checkpoint(old_run.step_folder(2)) == TrainState(
        step=2, source={"cursor": 4}, policy_version=2, entropy_coefficient=0.25, best_reward=0.5, best_step=1
    )


def test_a_run_of_the_first_version_is_resumed_to_its_end(old_run: RunFolder) -> None:
    saved = load_file(old_run.step_folder(2) / "model.safetensors")
    result = train_grpo(AGENT, SUITE, held_out=SUITE, resume=old_run.path)
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4]
    third = result.metrics[2]
    assert third["entropy_coefficient"] == 0.25  # where the controller had come to
    assert third["staleness_max"] == 0  # the policy samples as version 2
    drawn = [row["problem_id"] for row in old_run.rollouts() if row["step"] == 3]
    problems = draw(SuiteEnvironment(AGENT, SUITE, SUITE).problems("train"), 4, 2, seed=3)
    assert list(dict.fromkeys(drawn)) == [problem.id for problem in problems]
    trained = load_file(result.model_path / "model.safetensors")
    for name, tensor in saved.items():  # the learning rate is next to nothing
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6)
    assert old_run.report() is not None
    # what is written from now on has the format of this version
    assert json.loads((old_run.step_folder(4) / "state.json").read_text())["format"] == 2


def test_checkpoints_and_run_folders_of_a_later_version_are_refused_with_a_sentence(old_run: RunFolder) -> None:
    checkpoint = old_run.step_folder(2)
    (checkpoint / "state.json").write_text(json.dumps({"format": 3, "step": 2, "what": "ever"}))
    write_manifest(checkpoint)
    before = old_run.metrics_file.read_text()
    with pytest.raises(
        UnreadableFileError, match=r"has format 3, .* reads up to 2; resume with the version that wrote it"
    ):
        train_grpo(AGENT, SUITE, held_out=SUITE, resume=old_run.path)
    assert old_run.metrics_file.read_text() == before  # nothing is touched
    old_run.record_file.write_text(json.dumps({"format": 9, "name": "clerk"}))
    with pytest.raises(UnsupportedError, match=r"format 9, and this Palestra reads formats up to 1; update it"):
        train_grpo(AGENT, SUITE, held_out=SUITE, resume=old_run.path)
