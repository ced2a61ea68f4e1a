"""The short way in: what may be left out, and what that means."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import logging

from palestra import Agent, GRPOTrainingConfig
from palestra.api import GRPOTrainer, evaluate, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.rollout.rewards import as_list

AGENT = Agent("clerk", "palestra/tiny")


def test_no_config_and_an_empty_one_are_the_defaults_with_checkpoints() -> None:
    configs = [GRPOTrainer(AGENT, config=config).config for config in (None, {}, RunConfig())]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].checkpoint.every > 0


def price(item: str) -> float:
    """Look up a price."""
    return 1.0


def brief(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(("given", "functions"), [(None, []), ([], []), (brief, [brief]), ((brief,), [brief])])
def test_reward_functions_may_be_none_one_or_several(given: Any, functions: list[Any]) -> None:
    assert list(as_list(given)) == functions
    assert list(GRPOTrainer(AGENT, extra_reward_funcs=given).extra_reward_funcs) == functions


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: train_grpo(AGENT, reward_funcs=[brief]),
         r"^train_grpo has no argument 'reward_funcs'\. Did you mean 'extra_reward_funcs'"),
        (lambda: GRPOTrainer(AGENT, reward_funcs=[brief]),
         r"^GRPOTrainer has no argument 'reward_funcs'\. Did you mean 'extra_reward_funcs'"),
        (lambda: train_grpo(model="palestra/tiny", args=None),
         r"Did you mean 'agent'\? It takes agent, .*reward_measures, config"),
        (lambda: GRPOTrainer(AGENT, train_dataset=[]),  # TRL's, without a place here
         r"GRPOTrainer has no argument 'train_dataset'\. It takes agent, "),
        (lambda: evaluate(AGENT, None, reward_measures=[brief]),
         r"evaluate has no argument 'reward_measures'\. Did you mean 'measures'"),
        (lambda: GRPOTrainer(AGENT, device_map={"": 0}).config, r"model\.device"),
        (lambda: GRPOTrainer(AGENT, [lambda ctx: True], config="run.yaml").config,
         "config is of type str; expected a dict of settings"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_answered_with_the_right_one(call: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        call()


def test_a_trainer_has_its_arguments_as_attributes() -> None:
    config = GRPOTrainingConfig(num_generations=4)
    given: dict[str, Any] = {
        "reward_measures": [lambda ctx: True],
        "reward_weights": [1.0],
        "torch_dtype": "float32",
        "device_map": "cpu",
        "environment_factory": dict,
        "rollout_func": brief,
    }
    trainer = GRPOTrainer(Agent("a", "palestra/tiny", "Answer.", [price]), config=config, **given)
    assert {name: getattr(trainer, name) for name in given} == given
    assert (trainer.model_name, trainer.instructions) == ("palestra/tiny", "Answer.")
    assert [tool.name for tool in trainer.tools] == ["price"]
    assert (trainer.args, trainer.config.rollout.group_size) == (config, 4)
    assert trainer.config.model.device == "cpu"


def test_a_model_of_this_machine_loads_without_bars_and_the_users_own_setting_stays(capfd: Any) -> None:
    logging.enable_progress_bar()
    assert GRPOTrainer(AGENT, progress=False).model is not None
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()
