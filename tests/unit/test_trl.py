"""Scripts written for TRL: its trainer's arguments, its config, its parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
from datasets import Dataset
from palestra.trl import (
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    combine_rewards,
    eval_suite_to_hf_dataset,
    get_peft_config,
    measure_to_reward,
)
from palestra.trl import GRPOTrainer as TrlTrainer
from peft import LoraConfig

from palestra import EvalSuite, GRPOTrainer, GRPOTrainingConfig, measure
from palestra.core.errors import InputError, SettingError, StateError, UnsupportedError
from palestra.models.loading import load_model

PRICES = {"red lamp": 23, "blue mug": 45, "green chair": 67, "black desk": 89}
DATASET = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"What does a {item} cost?"}] for item in PRICES],
        "answer": [str(cost) for cost in PRICES.values()],
    }
)
TEXTS = [{"prompt": f"What does a {item} cost?", "answer": str(cost)} for item, cost in PRICES.items()]


def price(item: str) -> int:
    """
    Look up the price of one item.

    Args:
        item: The item's name.
    """
    return PRICES[item]


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [float(a in completion[-1]["content"]) for completion, a in zip(completions, answer, strict=True)]


async def brief(completions: list[Any]) -> list[float]:
    return [-len(completion[-1]["content"]) for completion in completions]


def config(folder: Path, **values: Any) -> GRPOConfig:
    sizes: dict[str, Any] = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return GRPOConfig(str(folder), **(sizes | {"max_steps": 2, "max_completion_length": 40} | values))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """As TRL's grpo_agent.py: a dataset of messages, tools, several reward functions."""
    args = config(tmp_path_factory.mktemp("out"), reward_weights=[1.0, 0.5], log_completions=True)
    args.chat_template_kwargs = {"enable_thinking": False}
    trainer = GRPOTrainer(
        model="palestra/tiny",
        train_dataset=DATASET,
        eval_dataset=None,
        tools=[price],
        reward_funcs=[right, brief],
        args=args,
        progress=False,
    )
    trainer.train()
    return trainer


def trainer_of(args: Any = None, **more: Any) -> GRPOTrainer:
    given = {"model": "palestra/tiny", "reward_funcs": right, "train_dataset": TEXTS, "progress": False}
    return GRPOTrainer(args=args, **(given | more))


def test_a_training_by_trls_arguments_has_trls_attributes(trainer: GRPOTrainer, tmp_path: Path) -> None:
    assert TrlTrainer is GRPOTrainer
    state = trainer.state
    assert (state.global_step, state.max_steps, len(state.log_history)) == (2, 2, 2)
    assert {"step", "loss", "reward", "learning_rate", "grad_norm"} <= state.log_history[-1].keys()
    assert trainer.processing_class is trainer.tokenizer
    assert [tool.name for tool in trainer.tools] == ["price"]
    assert (trainer.save_model(tmp_path / "saved") / "config.json").is_file()
    assert trainer.args.num_generations == 2
    assert trainer._result is not None
    with pytest.raises(StateError, match="not scored"):  # there is no eval_dataset
        _ = trainer._result.before


def test_weights_of_reward_functions_multiply_their_values(trainer: GRPOTrainer) -> None:
    row = trainer.state.log_history[0]
    assert row["reward"] == pytest.approx(row["score/right"] + row["score/brief"])
    assert (2 * row["score/brief"] * row["rollouts"]) % 1 == pytest.approx(0)  # lengths are whole numbers


class Counter:
    def reset(self, **row: Any) -> str:
        self.score = 0.0
        self.row = row
        return "count=0"

    def add(self, number: int) -> str:
        """
        Add to the count.

        Args:
            number: What is added.
        """
        self.score += number
        return f"count={self.score}"


def test_an_environment_with_an_adapter_trains(tmp_path: Path) -> None:
    """As TRL's grpo_2048.py."""
    seen = []

    def score(environments: list[Counter], **columns: Any) -> list[float]:
        seen.extend(environments)
        return [environment.score for environment in environments]

    args = config(tmp_path, report_to="none", trackio_space_id="x", num_completions_to_print=2, logging_steps=1)
    parts = {"environment_factory": Counter, "peft_config": LoraConfig()}
    trainer = trainer_of(args, train_dataset=DATASET, reward_funcs=score, **parts)
    trainer.train()
    assert seen[0].row["answer"] in map(str, PRICES.values())
    assert trainer.config.lora.r == 8
    assert hasattr(trainer.model, "disable_adapter")


def test_texts_as_prompts_give_reward_functions_texts_and_objects_are_used_as_they_are(tmp_path: Path) -> None:
    loaded = load_model("palestra/tiny")
    seen: list[Any] = []

    def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.extend([*prompts, *completions])
        return [float(len(completion)) for completion in completions]

    objects = {"model": loaded.model, "processing_class": loaded.tokenizer}
    trainer = trainer_of(config(tmp_path, max_steps=1), **objects, reward_funcs=length, eval_dataset=TEXTS[:2])
    assert trainer.model is loaded.model
    assert trainer.processing_class is loaded.tokenizer
    result = trainer.train()
    assert all(isinstance(text, str) for text in seen)
    assert any(text.startswith("What does a") for text in seen)
    assert result.before.split == "held_out"
    assert len(result.before.rollouts) == 2


def test_all_arguments_without_an_equivalent_are_rejected_in_one_error() -> None:
    args = GRPOConfig("out", push_to_hub=True, sync_ref_model=True, num_generation=4, optim="sgd", warmup_ratio=0.1)
    with pytest.raises(UnsupportedError) as error:
        trainer_of(args, reward_funcs=["org/reward-model"], callbacks=[object()])
    text = str(error.value)
    assert text.count("\n- ") == 7
    assert "trainer.model.push_to_hub" in text
    assert "warmup_ratio: use warmup_steps" in text
    assert "watcher" in text
    assert "Did you mean 'num_generations'?" in text


def test_arguments_that_are_switched_off_or_change_no_result_are_taken(tmp_path: Path) -> None:
    off = {"push_to_hub": False, "sync_ref_model": False, "dataloader_num_workers": 4}
    assert trainer_of(config(tmp_path, gradient_checkpointing=True, **off)).config.model.gradient_checkpointing


VLLM = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, "train.problems_per_step", 2),
        ({}, "train.epsilon_high", 0.2),
        ({"scale_rewards": False}, "train.advantage_scale", "none"),
        ({"save_strategy": "epoch", "per_device_train_batch_size": 16}, "checkpoint.every", 2),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, "train.scheduler", "constant"),
        ({"max_tool_calling_iterations": 3}, "rollout.max_tool_rounds", 3),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"report_to": ["wandb"]}, "track.report_to", ["wandb"]),
        ({}, "train.learning_rate", 1e-6),
        ({**VLLM}, "train.importance_correction", "sequence_mask"),
        ({**VLLM}, "train.importance_cap", 3.0),
        ({**VLLM}, "train.importance_floor", 0.0),
        ({**VLLM, "vllm_importance_sampling_clip_min": 0.5}, "train.importance_floor", 0.5),
        ({**VLLM, "vllm_importance_sampling_clip_max": None}, "train.importance_cap", 1e9),
        ({**VLLM, "vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_min": 0.5},
         "train.importance_correction", "none"),
    ],
)  # fmt: skip
def test_a_config_of_trls_means_the_same_here(values: dict[str, Any], key: str, expected: Any) -> None:
    assert trainer_of(GRPOConfig("out", **values)).config.value(key) == expected


def test_a_config_of_ours_is_taken_as_args() -> None:
    args = GRPOTrainingConfig(num_generations=4, learning_rate=1e-4)
    assert trainer_of(args).config.train.learning_rate == 1e-4


def test_completions_that_make_no_whole_groups_and_both_forms_at_once_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="multiple of num_generations = 3"):
        trainer_of(GRPOConfig("out", per_device_train_batch_size=4, num_generations=3))
    with pytest.raises(SettingError, match="extra_reward_funcs"):
        trainer_of(extra_reward_funcs=right)
    with pytest.raises(SettingError, match="needs an agent, or a model"):
        GRPOTrainer()


def test_rollout_func_finds_trls_attributes(tmp_path: Path) -> None:
    steps = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        steps.append(trainer.state.global_step)
        ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
        answers = [tokenizer("23")["input_ids"]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[0.0] * len(answers[0])] * len(prompts)}

    trainer_of(config(tmp_path, max_steps=1), train_dataset=DATASET, rollout_func=rollout_func).train()
    assert steps[0] == 0


def test_the_parser_reads_options_into_their_classes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("temperature: 0.5\nmax_steps: 7\n")
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    options = "--model_name_or_path palestra/tiny --learning_rate 1e-5 --push_to_hub True --use_peft --max_steps=3"
    options += f" --config {tmp_path / 'run.yaml'} --dataset_name d --report_to a b"
    script, args, model = parser.parse_args_and_config(options.split())
    assert (script.dataset_name, model.model_name_or_path, model.use_peft) == ("d", "palestra/tiny", True)
    assert (args.learning_rate, args.push_to_hub, args.max_steps, args.temperature) == (1e-5, True, 3, 0.5)
    assert args.report_to == ["a", "b"]
    assert get_peft_config(model).r == 16
    assert get_peft_config(ModelConfig()) is None


def test_measures_and_suites_go_on_in_trl() -> None:
    @measure
    def named(ctx: Any) -> bool:
        if not ctx.expect:
            raise ValueError("no answer is known")
        return str(ctx.expect) in ctx.final_assistant_message.text and ctx.case.row["item"] in ctx.messages[-2].text

    records = [
        {"input": f"What does a {item} cost?", "expect": str(cost), "item": item} for item, cost in PRICES.items()
    ]
    dataset = eval_suite_to_hf_dataset(EvalSuite.from_records(records, measures=[named]), "Be brief.")
    assert dataset[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    reward = measure_to_reward(named)
    columns = {name: dataset[name][:3] for name in ("item", "expect", "case_id")}
    columns["expect"][2] = ""
    answers = [[{"role": "assistant", "content": text}] for text in ("It is 23.", "I do not know.", "")]
    prompts = dataset["prompt"][:3]
    assert reward(prompts=prompts, completions=answers, trainer_state=None, **columns) == [1.0, 0.0, None]
    assert reward.__name__ == "named"
    both = combine_rewards([reward, lambda completions, **_: [0.5, None, None]], [2.0, 1.0])
    assert both(prompts=prompts, completions=answers, **columns) == [2.5, 0.0, None]
    with pytest.raises(InputError, match="1 weights for 2"):
        combine_rewards([reward, reward], [1.0])


def test_a_reward_of_a_measure_trains_here_too(tmp_path: Path) -> None:
    suite = EvalSuite.from_records([{"input": "Say a number.", "expect": "3"}], measures=[lambda ctx: 0.5])
    reward, dataset = measure_to_reward(suite.measures[0]), eval_suite_to_hf_dataset(suite)
    trainer = trainer_of(config(tmp_path, max_steps=1), reward_funcs=reward, train_dataset=dataset)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0.5
