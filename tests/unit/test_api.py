"""The short way in: what may be left out, and what that means."""

from __future__ import annotations

from typing import Any

import pytest

from palestra import Agent
from palestra.api import GRPOTrainer
from palestra.core.config import RunConfig
from palestra.rollout.rewards import as_list

AGENT = Agent("clerk", "palestra/tiny")


def test_no_config_and_an_empty_one_are_the_defaults_with_checkpoints() -> None:
    configs = [GRPOTrainer(AGENT, config=config).config for config in (None, {}, RunConfig())]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].checkpoint.every > 0


def brief(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(("given", "functions"), [(None, []), ([], []), (brief, [brief]), ((brief,), [brief])])
def test_reward_functions_may_be_none_one_or_several(given: Any, functions: list[Any]) -> None:
    assert list(as_list(given)) == functions
    assert list(GRPOTrainer(AGENT, extra_reward_funcs=given)._reward_functions) == functions


def test_a_model_of_this_machine_loads_without_bars_and_the_users_own_setting_stays(capfd: Any) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    assert GRPOTrainer(AGENT, progress=False).model is not None
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()
