import pytest

from palestra.core.config import RunConfig, load_yaml
from palestra.core.errors import PalestraError
from palestra.core.grpo_config import GRPOTrainingConfig


def test_later_layers_win_and_leave_the_rest_alone() -> None:
    config = RunConfig.build({"train": {"learning_rate": 1.0, "epochs": 3}}, {"train": {"learning_rate": 2.0}})
    assert (config.train.learning_rate, config.train.epochs) == (2.0, 3)


def test_an_unknown_key_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(PalestraError, match=r"train\.learning_rat'\. Did you mean 'train\.learning_rate'\?"):
        RunConfig.build({"train": {"learning_rat": 1.0}})


def test_a_group_of_one_is_refused_with_the_reason() -> None:
    with pytest.raises(PalestraError, match="use 2 or more"):
        RunConfig.build({"rollout": {"group_size": 1}})
    with pytest.raises(PalestraError, match=r"num_generations\) = 1 gives every advantage 0"):
        GRPOTrainingConfig(num_generations=1).to_run_config()


def test_rollouts_of_training_are_not_sampled_at_temperature_0() -> None:
    with pytest.raises(PalestraError, match=r"eval\.temperature"):
        RunConfig.build({"rollout": {"temperature": 0}})
    assert RunConfig.build({"eval.temperature": 0}).eval.temperature == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 2**32),
        ("train.adam_beta1", 1.5),
        ("train.adam_beta2", "nan"),
        ("train.learning_rate", "inf"),
        ("train.entropy_coefficient", "nan"),
        ("rollout.temperature", "inf"),
    ],
)
def test_a_number_that_no_training_can_use_is_refused_before_it_starts(key: str, value: object) -> None:
    with pytest.raises(PalestraError, match=f"^{key}: Input should be"):
        RunConfig.build({key: value})


def test_no_clipping_may_be_written_as_infinity() -> None:
    assert RunConfig.build({"train.max_grad_norm": "inf"}).train.max_grad_norm == float("inf")


def test_a_saved_config_reads_back_equal(tmp_path) -> None:
    import yaml

    config = RunConfig.build({"lora": {"r": 8}, "track": {"report_to": ["tensorboard"]}})
    config.save(tmp_path / "config.yaml")
    assert RunConfig.build(yaml.safe_load((tmp_path / "config.yaml").read_text())) == config


def test_the_flat_config_reaches_every_section() -> None:
    config = GRPOTrainingConfig(
        per_device_batch_size=3,
        gradient_accumulation_steps=4,
        num_generations=6,
        use_lora=True,
        lora_r=4,
        world_model_coeff=0.1,
        torch_dtype="float16",
        report_to="wandb",
    ).to_run_config()
    assert config.train.problems_per_step == 12
    assert config.rollout.group_size == 6
    assert config.lora.r == 4
    assert config.echo.coefficient == 0.1
    assert config.model.dtype == "float16"
    assert config.track.report_to == ["wandb"]


def test_lora_rank_counts_only_when_lora_is_on() -> None:
    assert GRPOTrainingConfig(lora_r=4).to_run_config().lora.r == 0
    assert GRPOTrainingConfig(lora_r=4, load_in_4bit=True).to_run_config().lora.r == 4


def test_vllm_is_used_where_it_is_asked_for() -> None:
    config = GRPOTrainingConfig(use_vllm=True, vllm_gpu_memory_utilization=0.5, vllm_max_model_len=64).to_run_config()
    assert config.vllm.model_dump(exclude_defaults=True) == {
        "mode": "colocate",
        "gpu_memory_utilization": 0.5,
        "max_model_len": 64,
    }
    served = GRPOTrainingConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://b:1").to_run_config()
    assert (served.vllm.mode, served.vllm.url) == ("server", "http://b:1")


def test_adapters_have_no_dropout_unless_it_is_given() -> None:
    """The sampler has none, so that it would sample from another policy than the learner's."""
    assert RunConfig().lora.dropout == GRPOTrainingConfig(use_lora=True).to_run_config().lora.dropout == 0.0


@pytest.mark.parametrize(("strategy", "every"), [("no", 0), ("steps", 7), ("epoch", 3)])
def test_the_save_strategy_says_when_checkpoints_are_written(strategy, every) -> None:
    config = GRPOTrainingConfig(save_strategy=strategy, save_steps=7, per_device_batch_size=2)
    assert config.to_run_config(problems=10).checkpoint.every == every


def test_checkpoints_by_epoch_need_the_problems_of_a_step() -> None:
    with pytest.raises(PalestraError, match="set per_device_batch_size"):
        GRPOTrainingConfig(save_strategy="epoch").to_run_config(problems=10)


@pytest.mark.parametrize(("given", "problems"), [({}, None), ({"per_device_batch_size": 8}, 16)])
def test_the_flat_config_leaves_what_is_not_given_to_the_run(given, problems) -> None:
    config = GRPOTrainingConfig(**given).to_run_config()
    assert config.train.problems_per_step == problems
    assert (config.train.epochs, config.rollout.group_size, config.rollout.max_new_tokens) == (None, None, None)


def test_sizes_of_a_step_that_are_given_stay() -> None:
    config = RunConfig.build({"rollout.group_size": 16}).with_step_size(8, 8, 256)
    assert (config.train.problems_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (8, 16, 256)
    assert config.with_step_size(2, 2, 2) is config


def test_the_flat_config_refuses_a_typo() -> None:
    with pytest.raises(PalestraError, match="Did you mean 'num_generations'"):
        GRPOTrainingConfig(num_generation=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("parameters", "rate", "lora_rate"),
    [
        (7_000_000_000, 1e-6, 2e-5),
        (1_600_000_000, 1.25e-6, 6.25e-5),
        (135_000_000, 1e-5, 1e-4),
        (1_800_000, 1e-3, 1e-4),
    ],
)
def test_the_learning_rate_suits_the_model_unless_it_is_given(parameters, rate, lora_rate):
    assert RunConfig().with_learning_rate(parameters).train.learning_rate == pytest.approx(rate)
    lora = RunConfig.build({"lora.r": 8}).with_learning_rate(parameters)
    assert lora.train.learning_rate == pytest.approx(lora_rate)
    assert RunConfig.build({"train.learning_rate": 3e-6}).with_learning_rate(parameters).train.learning_rate == 3e-6


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a: " + "{b: " * 200 + "1" + "}" * 200,
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
        + "".join(f"c{i + 1}: &c{i + 1} [{','.join([f'*c{i}' if i else '*b'] * 9)}]\n" for i in range(8)),
        "a: &a\n  b: *a\n",
    ],
)
def test_yaml_that_is_deep_or_grows_by_its_aliases_is_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(PalestraError, match=r"run\.yaml"):
        load_yaml(path)


def test_yaml_with_a_few_aliases_is_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: '[[['}\n")
    assert load_yaml(path) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": "[[["}}
