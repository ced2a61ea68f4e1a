"""TRL-style environments: one instance a rollout, public methods as tools, a reward of their own."""

from collections.abc import Sequence
from typing import Any

import pytest
from playing import attempt

from palestra import Agent, EvalSuite, measure, train_grpo
from palestra.core.errors import InputError, PalestraError
from palestra.core.types import Message, ToolCall
from palestra.envs.running import RunningEnv
from palestra.envs.suite_env import FactoryEnv, SuiteEnvironment, owns_reward
from palestra.evals.rollout_stats import rollout_stats


class Counter:
    """Count up to a number."""

    made = 0
    closed = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.count = start
        return f"You start at {start}." if start else None

    def up(self, by: int) -> int:
        """Count up.

        Args:
            by: How much.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)

    def close(self) -> None:
        type(self).closed += 1

    def _secret(self) -> None: ...


@measure
def factory_says_done(ctx):
    return "done" in ctx.final_assistant_message.text


SUITE = EvalSuite.from_records(
    [{"input": f"Count, please ({i}).", "start": i} for i in range(4)], measures=[factory_says_done]
)


def counts(messages: Sequence[Message]) -> Message:
    """Calls up(2), then says done."""
    if messages[-1].role == "tool":
        return Message("assistant", "done")
    return Message("assistant", "", tool_calls=(ToolCall("c", "up", {"by": 2}),))


def environment(factory: Any, suite: EvalSuite = SUITE, **more: Any) -> RunningEnv:
    agent = Agent("a", "palestra/tiny", "Count.")
    return RunningEnv(FactoryEnv(factory, SuiteEnvironment(agent, suite, **more), "Count."))


def play(env: RunningEnv, group_size: int = 2) -> list:
    return attempt(env, counts, group_size=group_size)


def test_every_rollout_has_an_instance_of_its_own_and_its_reward():
    Counter.made = Counter.closed = 0
    groups = play(environment(Counter))
    assert [[r.reward for r in g.rollouts] for g in groups] == [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]
    assert set(groups[0].rollouts[0].scores) == {"factory_says_done", "Counter"}
    assert Counter.made == Counter.closed == 9  # one more, to look at before training


def test_what_reset_returns_is_added_to_the_question():
    env = environment(Counter)
    opening = [env.open(env.problems("train")[i]).prompt for i in (0, 2)]
    assert opening[0] == [Message("system", "Count."), Message("user", "Count, please (0).")]
    assert opening[1][-1].text == "Count, please (2).\n\nYou start at 2."
    assert [t.name for t in env.open(env.problems("train")[0]).tools] == ["up"]


class Other(Counter):
    def get_reward(self) -> float:
        return -1.0


def test_a_dict_of_factories_is_chosen_from_by_the_row():
    suite = EvalSuite.from_records([{"input": f"{k}?", "environment": k} for k in ("one", "two", "three")])
    env = environment({"one": Counter, "two": Other}, suite, measures_required=False)
    groups = play(env, 1)
    assert [g.rollouts[0].reward for g in groups] == [2.0, -1.0, 0.0]
    assert "expected one of one, two" in groups[2].rollouts[0].error
    stats = rollout_stats([r for g in groups for r in g.rollouts])
    assert (stats["score/Counter"], stats["score/Other"], stats["rollout_failures"]) == (2.0, -1.0, 1.0)


def test_an_async_or_senseless_reward_and_a_close_that_relies_on_reset_are_dealt_with():
    class Waits(Counter):
        async def get_reward(self) -> float:  # type: ignore[override]
            return 0.5

    class Senseless(Counter):
        def get_reward(self) -> float:
            return float("nan")

    assert play(environment(Waits))[0].rollouts[0].reward == 1.5
    with pytest.raises(PalestraError, match=r"every rollout failed.*the reward is nan"):
        play(environment(Senseless))

    class Server(Counter):
        def reset(self, **row: Any) -> str | None:
            self.socket = "open"
            return super().reset(**row)

        def close(self) -> None:
            assert self.socket == "open"
            super().close()

    assert play(environment(Server))[0].rollouts[0].error is None


def test_a_factory_without_reset_or_with_an_undocumented_tool_is_told():
    class Undocumented(Counter):
        def down(self, by: int) -> int:
            return by

    with pytest.raises(InputError, match="object has no method reset"):
        environment(object)
    with pytest.raises(InputError, match="'down' has no docstring"):
        environment(Undocumented)


def test_a_factory_trains_an_adapter_with_echo_which_answers_and_is_saved_merged(tmp_path):
    seen: list[Any] = []

    def looks(prompts: list, completions: list, environments: list, **columns: Any) -> list[float]:
        seen.extend(environments)
        return [float(i) for i in range(len(completions))]

    result = train_grpo(
        Agent("counter", "palestra/tiny", "Use the tools to answer.", []),
        EvalSuite.from_records([{"input": f"Count up by {i}."} for i in range(5)]),
        environment_factory=Counter,
        extra_reward_funcs=[looks],
        config={
            "train.max_steps": 1, "train.problems_per_step": 1, "rollout.group_size": 2, "rollout.max_new_tokens": 60,
            "lora.r": 2, "echo.coefficient": 0.5, "model.gradient_checkpointing": True, "eval.cases": 1,
            "checkpoint.every": 0, "output_dir": str(tmp_path),
        },
    )  # fmt: skip
    assert len(result.metrics) == 1
    assert "loss" in result.metrics[0]
    assert seen
    assert all(isinstance(world, Counter) for world in seen)
    assert isinstance(result.generate("Count up by 2.", max_new_tokens=8, tools=[]), str)
    merged = result.save_model(tmp_path / "merged", merged=True)
    assert (merged / "config.json").is_file()
    assert (merged / "adapter" / "adapter_config.json").is_file()


def test_neither_measures_nor_an_own_reward_is_an_error():
    class Plain:
        def reset(self, **row: Any) -> None: ...

    assert owns_reward(Counter)
    assert owns_reward({"a": lambda: Counter()})
    assert not owns_reward({"a": Counter, "b": object})
    with pytest.raises(InputError, match="no measures"):
        train_grpo(Agent("a", "palestra/tiny"), EvalSuite.from_records([{"input": "?"}] * 3), environment_factory=Plain)
