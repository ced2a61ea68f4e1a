"""The short way in: what may be left out, and what that means."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import logging

from palestra import Agent, GRPOTrainingConfig
from palestra.api import GRPOTrainer, evaluate, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
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


@pytest.mark.parametrize("function", [train_grpo, GRPOTrainer])
def test_an_unknown_argument_is_answered_with_the_right_one(function: Any) -> None:
    with pytest.raises(PalestraError, match=r"no argument 'reward_funcs'\. Did you mean 'extra_reward_funcs'") as error:
        function(AGENT, reward_funcs=[brief])  # TRL's name for it
    assert str(error.value).startswith(function.__name__)


def test_train_grpo_takes_an_agent_where_trl_has_a_model() -> None:
    with pytest.raises(PalestraError, match=r"Did you mean 'agent'\? It takes agent, .*reward_measures, config"):
        train_grpo(model="palestra/tiny", args=None)  # type: ignore[call-arg]


def test_an_argument_of_trl_without_a_place_here_gets_no_guess() -> None:
    with pytest.raises(PalestraError, match=r"GRPOTrainer has no argument 'train_dataset'\. It takes agent, "):
        GRPOTrainer(AGENT, train_dataset=[])


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


def test_a_device_map_is_one_device() -> None:
    with pytest.raises(PalestraError, match=r"model\.device"):
        _ = GRPOTrainer(AGENT, device_map={"": 0}).config  # type: ignore[arg-type]


def test_a_measure_of_an_evaluation_has_its_own_name() -> None:
    with pytest.raises(PalestraError, match=r"evaluate has no argument 'reward_measures'\. Did you mean 'measures'"):
        evaluate(AGENT, None, reward_measures=[brief])  # type: ignore[call-arg, arg-type]


def test_a_model_of_this_machine_loads_without_bars_and_the_users_own_setting_stays(capfd: Any) -> None:
    logging.enable_progress_bar()
    assert GRPOTrainer(AGENT, progress=False).model is not None
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_a_config_that_is_no_settings_is_refused() -> None:
    agent = Agent("a", "palestra/tiny", "Answer.")
    with pytest.raises(PalestraError, match="config is of type str; expected a dict of settings"):
        _ = GRPOTrainer(agent, [lambda ctx: True], config="run.yaml").config
