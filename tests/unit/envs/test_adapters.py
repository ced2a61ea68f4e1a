"""Environments of other libraries, by their forms: verifiers of both generations, OpenEnv over its wire, gymnasium."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from palestra import EnvConfig
from palestra.core.errors import PalestraError
from palestra.core.types import Message, Rollout, SamplingParams, ToolCall
from palestra.envs.adapters.gymnasium import GymEnv
from palestra.envs.adapters.openenv import OpenEnv
from palestra.envs.adapters.verifiers import TasksetEnv, VerifiersEnv
from palestra.envs.env import Env
from palestra.envs.running import RunningEnv
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.collect import Collector, endpoint_speakers, require_one_good

SMALL = EnvConfig(train_size=3, held_out_size=2)


@dataclass
class Says:
    """Answers with what `speak` makes of the messages."""

    speak: Callable[[Sequence[Message]], Message | str]

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict], sampling: SamplingParams) -> Any:
        said = self.speak(messages)
        return said if isinstance(said, Message) else Message("assistant", said), "stop", 1


def play(env: Env, speak: Callable[[Sequence[Message]], Any], count: int = 3) -> list[Rollout]:
    running = RunningEnv(env)
    collector = Collector(
        running, AttemptLimits(SamplingParams(50), max_tool_rounds=20), endpoint_speakers(Says(speak))
    )
    problems = running.problems("train")[:count]
    groups = asyncio.run(collector.collect(problems, 1, [p.id for p in problems]))
    require_one_good(groups)
    return [group.rollouts[0] for group in groups]


ROWS = [{"prompt": [{"role": "user", "content": f"Repeat: {i}"}], "answer": str(i), "info": {}} for i in range(40)]


@dataclass
class Rubric:
    async def score_rollout(self, state: dict) -> None:
        state["reward"] = 2.0 * (state["completion"][-1]["content"] == state["answer"])


class OldRubric:
    async def score_rollout(self, prompt, completion, answer, state, task, info, example_id=None) -> Any:
        return SimpleNamespace(reward=float(completion[-1]["content"] == answer), metrics={})


@dataclass
class SingleTurn:
    rubric: Any = field(default_factory=Rubric)
    max_turns: int = 1
    eval_rows: Sequence[dict] = tuple(ROWS)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Sequence[dict]:
        return ROWS

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Sequence[dict]:
        return self.eval_rows


def repeat(messages: Sequence[Message]) -> str:
    return next(m.text for m in messages if m.role == "user").removeprefix("Repeat: ")


@pytest.mark.parametrize(("rubric", "reward"), [(Rubric(), 2.0), (OldRubric(), 1.0)])
def test_a_verifiers_environment_is_scored_by_its_rubric(rubric, reward):
    assert [r.reward for r in play(VerifiersEnv(SingleTurn(rubric)), repeat)] == [reward] * 3
    assert [r.reward for r in play(VerifiersEnv(SingleTurn(rubric)), lambda _: "no")] == [0.0] * 3


def test_verifiers_problems_are_never_both_trained_on_and_held_out():
    for theirs in (SingleTurn(), SingleTurn(eval_rows=ROWS[:5])):
        running = RunningEnv(VerifiersEnv(theirs))
        train, held_out = ({p.input for p in running.problems(split)} for split in ("train", "held_out"))
        assert train
        assert held_out
        assert not train & held_out


class CountDown(SingleTurn):
    """Three turns: 'go on' until 0."""

    async def setup_state(self, state: dict) -> dict:
        state["left"] = 3
        return state

    async def is_completed(self, messages: list, state: dict) -> bool:
        return state["left"] == 0

    async def env_response(self, messages: list, state: dict) -> tuple[list[dict], dict]:
        state["left"] -= 1
        return [{"role": "user", "content": f"{state['left']} left"}], state


def test_a_multi_turn_verifiers_environment_answers():
    (rollout,) = play(VerifiersEnv(CountDown(max_turns=9)), repeat, count=1)
    assert [m.text for m in rollout.messages if m.role == "user"][1:] == ["2 left", "1 left", "0 left"]
    assert rollout.reward == 2.0


@dataclass
class WithTools(SingleTurn):
    max_turns: int = 9

    @property
    def tools(self) -> list:
        def echo(text: str) -> str:
            """Say the same."""
            return text

        return [echo]


def test_the_tools_of_a_verifiers_environment_are_offered():
    def speak(messages: Sequence[Message]) -> Message:
        if messages[-1].role == "tool":
            return Message("assistant", messages[-1].text)
        return Message("assistant", "", tool_calls=(ToolCall("c", "echo", {"text": repeat(messages)}),))

    assert [r.reward for r in play(VerifiersEnv(WithTools()), speak)] == [2.0] * 3
    with pytest.raises(PalestraError, match="not supported"):
        VerifiersEnv(SimpleNamespace(update_tool_args=print))


class Task:
    config = None

    def __init__(self, number: int) -> None:
        self.data = SimpleNamespace(prompt=f"Repeat: {number}", system_prompt="Be exact.", answer=str(number))

    @classmethod
    def toolsets(cls, config: Any) -> list:
        return []

    async def score(self, trace: Any, runtime: Any = None) -> None:
        trace.record_metric("turns", trace.num_turns)
        trace.record_reward("right", trace.last_reply == self.data.answer, 0.5)


class WithRuntime(Task):
    async def score(self, trace: Any, runtime: Any = None) -> None:
        trace.rewards["right"] = None


def test_a_v1_taskset_scores_what_was_said():
    rollouts = play(TasksetEnv([Task(i) for i in range(40)]), repeat)
    assert [r.reward for r in rollouts] == [0.5] * 3
    assert [m.role for m in rollouts[0].messages] == ["system", "user", "assistant"]
    with pytest.raises(PalestraError, match="without a runtime"):
        play(TasksetEnv([WithRuntime(i) for i in range(40)]), repeat)


class Corridor:
    """Walk right to the end."""

    action_space = SimpleNamespace(n=2)
    closed = False

    def reset(self, seed: int) -> tuple[str, dict]:
        self.at = seed % 2
        return f"You are at {self.at}.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict]:
        self.at += 1 if action == 1 else -1
        return f"You are at {self.at}.", float(self.at == 3), self.at == 3, False, {}

    def close(self) -> None:
        self.closed = True


def test_a_gymnasium_environment_is_played_by_answers():
    env = GymEnv(Corridor, "Walk.", actions=("Left", "Right"), config=SMALL)
    walks = iter(["jump", "1", "Right", "right"])
    (rollout,) = play(env, lambda messages: next(walks), count=1)
    assert [m.text for m in rollout.messages if m.role == "user"] == [
        "Walk.\n\nYou are at 0.",
        "That is no action. Say one of: left, right.",
        "You are at 1.",
        "You are at 2.",
    ]
    assert (rollout.reward, rollout.passed) == (1.0, True)


ACTION = {"type": "object", "properties": {"move": {"type": "integer"}, "metadata": {}}, "required": ["move"]}


@pytest.fixture
def openenv_server() -> Iterator[str]:
    server = pytest.importorskip("websockets.sync.server")

    def handle(socket: Any) -> None:
        total = 0
        for raw in socket:
            message = json.loads(raw)
            if message["type"] == "reset":
                total = message["data"]["seed"]
            elif message["data"]["move"] > 9:
                socket.send(json.dumps({"type": "error", "data": {"message": "too far", "code": "BAD"}}))
                continue
            else:
                total += message["data"]["move"]
            data = {"observation": {"at": total}, "reward": 0.25 if total else None, "done": total >= 4}
            socket.send(json.dumps({"type": "observation", "data": data}))

    def http(connection: Any, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, json.dumps({"action": ACTION})) if request.path == "/schema" else None

    with server.serve(handle, "127.0.0.1", 0, process_request=http) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()


def test_an_openenv_server_is_played_through_its_one_action(openenv_server):
    moves = iter([99, 2, 2, 1])

    def speak(messages: Sequence[Message]) -> Message:
        move = next(moves, None)
        if move is None:
            return Message("assistant", "done")
        return Message("assistant", "", tool_calls=(ToolCall("c", "act", {"move": move}),))

    (rollout,) = play(OpenEnv(openenv_server, SMALL), speak, count=1)
    assert rollout.messages[1].text == 'Begin.\n\n{"at": 0}'
    assert [m.text for m in rollout.messages if m.role == "tool"] == [
        "Error: act raised RuntimeError: too far",
        '{"at": 2}',
        '{"at": 4}\nThe episode is over.',
        "The episode is over.",
    ]
    assert rollout.reward == 0.5


def test_an_openenv_server_that_is_not_there_is_told():
    with pytest.raises(PalestraError, match="is no OpenEnv server"):
        RunningEnv(OpenEnv("ws://127.0.0.1:9"))
