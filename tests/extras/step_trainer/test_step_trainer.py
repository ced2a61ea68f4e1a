"""GRPO by hand, on a random model and on the embedded one. tests/learn/test_step_trainer.py has rewards that rise."""

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, ServiceError, SettingError, StateError, TrainingError
from palestra.train import StepTrainer

ROWS = [("Say something.", "e"), ("Count to three.", "e"), ("Who are you?", "e")]


Make = Callable[..., StepTrainer]


def share_of_letter(output: str, expected_answer: str) -> float:
    return output.count(expected_answer) / max(len(output), 1)


def settings(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    base = {
        "output_dir": str(folder),
        "track": {"run_name": "run"},
        # A random model seldom ends by itself.
        "train": {"learning_rate": 5e-3, "max_steps": 2, "problems_per_step": 2, "mask_truncated": False},
        "rollout": {"group_size": 8, "max_new_tokens": 8, "temperature": 1.0},
    }
    return RunConfig.build(base, sections)


@pytest.fixture
def random_model(tiny: Any) -> Any:
    """A layer of the embedded model's shape with fresh weights: it says anything, so every reward has variance."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny.model.config)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def make(random_model: Any, tiny: Any, tmp_path: Path) -> Callable[..., StepTrainer]:
    """A trainer of the random model with some sections of the settings changed."""
    return lambda reward=share_of_letter, **sections: StepTrainer(
        random_model, tiny.tokenizer, reward, settings(tmp_path, **sections)
    )


@pytest.fixture
def trainer(make: Make) -> StepTrainer:
    return make()


def test_every_step_trains_the_sampled_tokens_and_reports_what_the_trainer_promises(trainer: StepTrainer) -> None:
    async def notebook_cell() -> dict[str, float]:
        return trainer.train_step("Say something.", "e")  # inside a running event loop

    names = [f"{what}_{how}" for what in ("reward", "advantage") for how in ("mean", "max", "min")]
    for step, metrics in enumerate((trainer.train_step("Say something.", "e"), asyncio.run(notebook_cell())), start=1):
        assert metrics["kl_sampler"] < 1e-8
        assert metrics["ratio_mean"] == pytest.approx(1.0)
        assert metrics["tokens_trained"] == metrics["sampled_tokens"]
        assert {"loss", "step", "epoch", *names} <= metrics.keys()
        assert metrics["step"] == step
        assert metrics["weighted_loss"] == metrics["loss"]  # no KL, no entropy bonus
        assert metrics["advantages"] == pytest.approx(trainer.calculate_advantages(metrics["rewards"]), abs=1e-5)
        assert max(metrics["rewards"]) == metrics["reward_max"]


def test_a_group_shares_its_prompt_and_differs_in_its_answers(trainer: StepTrainer) -> None:
    outputs = trainer.generate_group_outputs("Say something.")
    assert len({o.prompt_ids for o in outputs}) == 1
    assert len({tuple(o.sampled.token_ids.tolist()) for o in outputs}) == len(outputs) == 8
    assert all(isinstance(o, str) and o.text == o and o.reward is None for o in outputs)
    again = trainer.generate_group_outputs("Say something.", reference_output="e")
    assert again == outputs
    assert [o.reward for o in again] == [share_of_letter(o, "e") for o in outputs]


def test_advantages_are_deviations_in_units_of_the_groups_spread(trainer: StepTrainer) -> None:
    assert trainer.calculate_advantages([0.0, 1.0]) == pytest.approx([-0.7071, 0.7071], abs=1e-3)
    assert trainer.calculate_advantages([3.0, 3.0, 3.0]) == [0.0, 0.0, 0.0]


def test_equal_rewards_change_nothing_and_the_users_scheduler_moves_on(make: Make) -> None:
    trainer = make(lambda o, e: 1.0, train={"max_steps": 3})
    before = [p.clone() for p in trainer.model.parameters()]
    assert trainer.train_step("Hi", None)["loss"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    trainer.train(ROWS, optimizer, scheduler)
    assert scheduler.get_last_lr() == [0.125]


def test_the_pass_rate_is_the_share_of_rewards_of_at_least_one(make: Make) -> None:
    rewards = iter([1.0, 0.5, 2.0, 0.0])
    assert make(lambda o, e: next(rewards), rollout={"group_size": 4}).train_step("Hi")["pass_rate"] == 0.5


def test_checkpoints_hold_model_tokenizer_and_training_config(make: Make) -> None:
    trainer = make(train={"max_steps": 3}, checkpoint={"every": 2})
    history = trainer.train(ROWS)
    assert [row["step"] for row in history["rows"]] == [1, 2, 3]
    assert [row["epoch"] for row in history["rows"]] == pytest.approx([2 / 3, 4 / 3, 2.0])
    files = ["config.yaml", "index.json", "metrics.jsonl", "report.html", "report.json", "rollouts.jsonl"]
    files += ["run.json", "run.lock"]
    assert sorted(p.name for p in trainer.folder.iterdir() if p.is_file()) == files
    folders = {p.name for p in trainer.folder.iterdir() if p.is_dir()}
    assert folders == {"checkpoint-2", "final", "model", "tokens"}
    assert history["loss"] == [row["loss"] for row in history["rows"]]
    assert history["reward"] == [row["reward_mean"] for row in history["rows"]]
    assert history["steps"] == 3
    saved = json.loads((trainer.folder / "checkpoint-2" / "training_config.json").read_text())
    assert saved.pop("timestamp")
    sizes = {"batch_size": 2, "num_epochs": 1, "max_steps": 3, "num_generations": 8}
    assert saved == {"learning_rate": 5e-3, "step": 2} | sizes
    again = AutoModelForCausalLM.from_pretrained(trainer.folder / "final")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True))
    lines = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [row["loss"] for row in history["rows"]]


def test_a_pass_over_the_dataset_has_every_row_once_whatever_was_trained_before(make: Make) -> None:
    seen: list[str] = []

    def reward(output: str, expected: str) -> float:
        seen.append(expected)
        return share_of_letter(output, "e")

    trainer = make(reward, train={"max_steps": None, "problems_per_step": 1}, rollout={"group_size": 2})
    trainer.train_step("Hi", "by hand")
    history = trainer.train([("Say something.", "a"), ("Count to three.", "b"), ("Who are you?", "c")])
    assert sorted(set(seen[2:])) == ["a", "b", "c"]
    assert len(seen) == 2 + 3 * 2
    assert [row["step"] for row in history["rows"]] == [2, 3, 4]
    assert trainer.step == 4


def test_what_was_done_before_an_error_counts(make: Make) -> None:
    steps: list[int] = []

    def reward(output: str, expected: str) -> float:
        steps.append(trainer.step)
        return float("nan") if trainer.step == 2 and expected == "e" else share_of_letter(output, "e")

    trainer = make(reward, train={"max_steps": 5})
    with pytest.raises(TrainingError, match=r"step 3: .* is nan"):
        trainer.train(ROWS)
    assert sorted(set(steps)) == [0, 1, 2]
    assert trainer.step == 2
    metrics = trainer.train_step("Say something.", "by hand")
    assert metrics["step"] == 3
    assert metrics["staleness_max"] == 0


def test_the_users_optimizer_and_scheduler_do_the_stepping(trainer: StepTrainer, random_model: Any) -> None:
    optimizer = torch.optim.SGD(random_model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
    before = [p.clone() for p in random_model.parameters()]
    history = trainer.train(ROWS, optimizer, scheduler)
    assert [row["learning_rate"] for row in history["rows"]] == pytest.approx([0.5, 0.05])
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, random_model.parameters(), strict=True)]).norm()
    # SGD moves by the learning rate times the clipped gradient, whose norm is at most 1; Adam would move further.
    assert 0 < moved <= 0.55 + 1e-4


def test_a_step_by_hand_is_made_by_the_users_optimizer(trainer: StepTrainer, random_model: Any) -> None:
    optimizer = torch.optim.SGD(random_model.parameters(), lr=0.0)
    before = [p.clone() for p in random_model.parameters()]
    metrics = trainer.train_step("Say something.", "e", optimizer)
    optimizer.step()  # of the loop around it: there is nothing left to do
    assert metrics["learning_rate"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, random_model.parameters(), strict=True))


def test_an_optimizer_that_the_trainer_does_not_use_is_warned_about(trainer, random_model, caplog) -> None:
    optimizer = torch.optim.SGD(random_model.parameters(), lr=100.0)
    trainer.train_step("Say something.", "e")
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
    assert caplog.text.count("optimizer.step() has no effect") == 1


def test_without_a_config_the_file_of_the_working_folder_is_read(random_model, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text(
        "model: {max_new_tokens: 24}\nrl:\n  training: {max_steps: 4, learning_rate: 1.0e-4}\n"
        "  generation: {num_generations: 6, temperature: 0.9}\n"
    )
    trainer = StepTrainer(random_model, tiny.tokenizer, share_of_letter)
    assert (trainer.max_new_tokens, trainer.max_steps, trainer.learning_rate) == (24, 4, 1e-4)
    assert (trainer.num_generations, trainer.temperature, trainer.wandb_enabled) == (6, 0.9, False)
    assert trainer.reward_model is share_of_letter
    assert trainer.output_dir == trainer.folder
    with pytest.raises(AttributeError, match="no attribute 'batch'"):
        _ = trainer.batch


class Judge:
    def calculate_combined_reward(self, output: str, expected_answer: str) -> float:
        return 2.0 + share_of_letter(output, expected_answer)


def test_a_reward_object_is_asked_for_its_combined_reward(make: Make) -> None:
    assert make(Judge()).train_step("Hi", "e")["reward_min"] >= 2.0


@pytest.mark.parametrize(("value", "complaint"), [(float("nan"), "finite"), ("good", "expected a number")])
def test_a_reward_that_is_no_finite_number_is_refused(value: Any, complaint: str, make: Make) -> None:
    with pytest.raises(PalestraError, match=complaint):
        make(lambda o, e: value).train_step("Hi", "e")


def test_what_cannot_be_trained_is_refused(trainer: StepTrainer, tmp_path: Path) -> None:
    for rows in ([], [{"question": "2 + 2"}], ["2 + 2"], [{"prompt": "", "answer": "4"}]):
        with pytest.raises(PalestraError, match="prompt"):
            trainer.train(rows)
    with pytest.raises(ServiceError, match="context"):
        trainer.generate_group_outputs("word " * 5000)
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(SettingError, match="no trainable weight of this model"):
        trainer.train(ROWS, other)


def test_a_folder_that_holds_another_run_is_refused(trainer: StepTrainer, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(StateError, match="holds a run already"):
        trainer.train(ROWS)


def test_answers_that_were_all_cut_off_are_warned_of(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(train={"mask_truncated": True}, rollout={"max_new_tokens": 2}).train_step("Say something.", "e")
    assert "cut off at max_new_tokens=2" in caplog.text


YAML = """
model: {base_model_name: palestra/tiny, max_new_tokens: 6}
rl:
  training: {per_device_train_batch_size: 1, learning_rate: 1.0e-3, num_train_epochs: 2, max_steps: 1}
  generation: {num_generations: 3, temperature: 0.9, top_p: 1.0}
wandb: {enabled: false, project: gym, entity: me}
"""


def yaml_file(folder: Path, more: str = "") -> Path:
    path = folder / "config.yaml"
    path.write_text(YAML + more)
    return path


def test_one_yaml_file_gives_the_whole_trainer(tmp_path: Path) -> None:
    trainer = StepTrainer.from_yaml(yaml_file(tmp_path), share_of_letter, tmp_path / "out")
    assert trainer.config.model.name == "palestra/tiny"
    assert len(trainer.generate_group_outputs([{"role": "user", "content": "Hi"}])) == 3
    assert trainer.config.rollout.max_new_tokens == 6
    assert trainer.train(ROWS)["steps"] == 1
    assert (tmp_path / "out" / "final" / "training_config.json").is_file()


def test_a_model_with_a_config_path_and_an_output_dir_makes_a_trainer(random_model, tiny, tmp_path) -> None:
    path = yaml_file(tmp_path, "lora: {r: 2}\n")
    more = {"reward_model": share_of_letter, "config_path": str(path), "output_dir": str(tmp_path / "out")}
    trainer = StepTrainer(model=random_model, tokenizer=tiny.tokenizer, **more)
    assert trainer.config.rollout.group_size == 3
    assert trainer.folder == tmp_path / "out"
    assert hasattr(trainer.model, "disable_adapter")  # lora.r acts on a model that has no adapter yet
    assert len(trainer.train_step("Hi", "e")["rewards"]) == 3
    with pytest.raises(SettingError, match="config and config_path are one setting"):
        StepTrainer(None, None, share_of_letter, RunConfig(), config_path=path)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("echo: {coefficient: 0.5}", r"echo\.coefficient = 0\.5 has no effect here: StepTrainer samples without tools"),
        ("rollout: {max_staleness: 1}", "StepTrainer samples and learns in turns"),
        ("rollout: {policy_url: 'http://a'}", "samples with our own engine"),
        ("eval: {every: 5}", r"eval\.every = 5 has no effect here: StepTrainer trains on all prompts"),
        ("checkpoint: {keep_last: 1}", "keeps every checkpoint"),
        ("lora: {load_in_4bit: true}", "needs a CUDA GPU, and none is there"),
    ],
)
def test_settings_that_cannot_act_in_the_step_trainer_are_refused_by_name(more, complaint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PalestraError, match=complaint):
        StepTrainer.from_yaml(yaml_file(tmp_path, more), share_of_letter)


def test_without_wandb_the_trainer_warns_and_goes_on(make, monkeypatch, caplog) -> None:
    monkeypatch.setattr("palestra.extras.step_trainer.trainer.find_spec", lambda name: None)
    assert make(track={"report_to": ["wandb", "tensorboard"]}).config.track.report_to == ["tensorboard"]
    assert "wandb is not installed" in caplog.text
