"""GymEnv against gymnasium itself."""

import pytest
from playing import attempt

from palestra.core.errors import PalestraError, SettingError, UnsupportedError
from palestra.envs.discover import load_env
from palestra.envs.env import EnvConfig
from palestra.envs.running import RunningEnv
from palestra.extras.adapters.gymnasium import GymEnv

gymnasium = pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")
SMALL = EnvConfig(train_size=2, held_out_size=2)


def play(running, *answers):
    words = iter(answers)
    ((rollout,),) = (group.rollouts for group in attempt(running, lambda _: next(words), 1))
    return rollout, [m.text for m in rollout.messages if m.role == "user"]


class Door(gymnasium.Env):
    """Opens by action 3 of 1 to 3."""

    action_space = gymnasium.spaces.Discrete(3, start=1)
    observation_space = gymnasium.spaces.Dict(
        {"at": gymnasium.spaces.Box(0, 9, (2,)), "keys": gymnasium.spaces.Discrete(3)}
    )

    def reset(self, *, seed=None, options=None):
        return {"at": np.array([1.0, 2.0]), "keys": np.int64(2)}, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return {"at": np.zeros(2), "keys": np.int64(0)}, float(action == 3), action == 3, False, {}


def test_actions_that_do_not_start_at_0_are_named_in_the_first_prompt_and_taken_by_number_or_name():
    rollout, said = play(RunningEnv(GymEnv(Door, "Open it.", config=SMALL)), "0", "1", "3")
    assert said == [
        'Open it.\n\n{"at": [1.0, 2.0], "keys": 2}\n\nSay a number from 1 to 3.',
        "That is no action. Say a number from 1 to 3.",
        '{"at": [0.0, 0.0], "keys": 0}',
    ]
    assert (rollout.reward, rollout.passed) == (1.0, True)
    rollout, said = play(RunningEnv(GymEnv(Door, actions=("push", "kick", "Turn"), config=SMALL)), "turn")
    assert said[0].endswith("Say one of: push, kick, turn.")
    assert rollout.reward == 1.0
    with pytest.raises(SettingError, match="2 names for 3 actions"):
        RunningEnv(GymEnv(Door, actions=("push", "kick"), config=SMALL))


class Costly(Door):
    """Every step costs 1."""

    def step(self, action):
        _, _, ended, cut, info = super().step(action)
        return "You pay.", -1.0, ended, cut, info


class ThreeTurns(GymEnv):
    max_turns = 3


def test_an_attempt_without_a_valid_action_fails_instead_of_getting_the_best_score():
    with pytest.raises(PalestraError, match=r"no answer was an action, the last one 'hm'\. Say a number from 1 to 3"):
        play(RunningEnv(ThreeTurns(Costly, config=SMALL)), "hm", "hm", "hm")
    acted, said = play(RunningEnv(ThreeTurns(Costly, config=SMALL)), "hm", "1", "3")
    assert (acted.error, acted.reward, said[-1]) == (None, -1.0, "You pay.")
    silent, _ = play(RunningEnv(ThreeTurns(Costly, config=SMALL, invalid_reward=-2)), "hm", "hm", "hm")
    assert silent.error is None, "with a reward for wrong answers every attempt counts"
    assert silent.reward < -2.0


@pytest.mark.parametrize(
    "space",
    [gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.MultiDiscrete([2, 3]), gymnasium.spaces.MultiBinary(2)],
)
def test_actions_that_no_text_can_name_are_refused_before_training(space):
    class Arm(Door):
        action_space = space

    with pytest.raises(UnsupportedError, match="only Discrete and Text"):
        RunningEnv(GymEnv(Arm, config=SMALL))


def test_an_environment_of_gymnasium_is_trained_by_its_id():
    running = load_env("gymnasium:FrozenLake-v1", {"arguments": '{"is_slippery": false}', "train_size": "3"})
    rollout, said = play(running, "1", "1", "2", "1", "2", "2")
    assert rollout.reward == 1.0
    assert said[0].endswith("Say a number from 0 to 3.")
    assert len(running.problems("train")) == 3
