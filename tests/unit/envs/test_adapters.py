"""Environments of other libraries, by their forms: verifiers of both generations, OpenEnv over its wire."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from playing import attempt

from palestra import EnvConfig
from palestra.core.errors import (
    MissingPackageError,
    NotFoundError,
    PalestraError,
    ResourceError,
    ServiceError,
    UnsupportedError,
    UserCodeError,
)
from palestra.core.types import Message, Rollout, ToolCall
from palestra.envs.discover import load_env
from palestra.envs.env import Env
from palestra.envs.running import RunningEnv
from palestra.extras.adapters.openenv import OpenEnv
from palestra.extras.adapters.verifiers import TasksetEnv, VerifiersEnv

SMALL = EnvConfig(train_size=3, held_out_size=2)


def play(env: Env, speak: Callable[[Sequence[Message]], Any], count: int = 3) -> list[Rollout]:
    return [group.rollouts[0] for group in attempt(RunningEnv(env), speak, count)]


ROWS = [{"prompt": [{"role": "user", "content": f"Repeat: {i}"}], "answer": str(i), "info": {}} for i in range(40)]


@dataclass
class Rubric:
    async def score_rollout(self, state: dict) -> None:
        state["reward"] = 2.0 * (state["completion"][-1]["content"] == state["answer"])


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


def test_a_verifiers_environment_is_scored_by_its_rubric():
    assert [r.reward for r in play(VerifiersEnv(SingleTurn()), repeat)] == [2.0] * 3
    assert [r.reward for r in play(VerifiersEnv(SingleTurn()), lambda _: "no")] == [0.0] * 3


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

    @property
    def _stop_conditions(self) -> list:
        async def has_ended(state: dict) -> bool:
            return state["left"] == 0

        return [lambda state: state["left"] < 0, has_ended]  # verifiers takes functions of both kinds

    async def env_response(self, messages: list, state: dict) -> list[dict]:
        state["left"] -= 1
        return [{"role": "user", "content": f"{state['left']} left"}]


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


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (SimpleNamespace(update_tool_args=print), "not supported"),
        (SimpleNamespace(harness=object()), r"scores its attempts by a harness of its own.*palestra serve"),
    ],
)
def test_a_verifiers_environment_that_plays_by_itself_is_refused(theirs, words):
    with pytest.raises(UnsupportedError, match=words):
        VerifiersEnv(theirs)


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


class LooksAround(Task):
    async def score(self, trace: Any, runtime: Any = None) -> None:
        assert trace.id
        assert trace.stop_condition
        assert trace.tool_messages == []
        assert [m.content for m in trace.assistant_messages] == [trace.last_reply]
        assert "[user]\nRepeat" in trace.transcript
        trace.state.seen = trace.last_message.role
        trace.record_reward("right", trace.state.seen == "assistant")


def test_a_v1_taskset_scores_what_was_said_and_finds_the_attributes_of_a_trace():
    for kind, reward in ((Task, 0.5), (LooksAround, 1.0)):
        rollouts = play(TasksetEnv([kind(i) for i in range(40)]), repeat)
        assert [r.reward for r in rollouts] == [reward] * 3
        assert [m.role for m in rollouts[0].messages] == ["system", "user", "assistant"]
    with pytest.raises(PalestraError, match="without a runtime"):
        play(TasksetEnv([WithRuntime(i) for i in range(40)]), repeat)


CAPACITY = {"message": "Server at capacity: 1/1 sessions active", "code": "CAPACITY_REACHED", "max_sessions": 1}
ACTION = {"type": "object", "properties": {"move": {"type": "integer"}, "metadata": {}}, "required": ["move"]}


@contextmanager
def served(handle: Callable[[Any], None], action: dict) -> Iterator[str]:
    server = pytest.importorskip("websockets.sync.server")

    def http(connection: Any, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, json.dumps({"action": action})) if request.path == "/schema" else None

    with server.serve(handle, "127.0.0.1", 0, process_request=http) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()


@pytest.fixture
def openenv_server() -> Iterator[str]:
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

    with served(handle, ACTION) as url:
        yield url


def test_a_server_without_a_free_session_is_quoted_with_the_remedy(monkeypatch):
    monkeypatch.setattr("palestra.extras.adapters.openenv._RELEASE_S", 0.0)
    refused = []

    def full(socket: Any) -> None:
        refused.append(json.loads(socket.recv())["type"])
        socket.send(json.dumps({"type": "error", "data": CAPACITY}))
        socket.close()

    with (
        served(full, ACTION) as url,
        pytest.raises(PalestraError, match=r"at capacity: 1/1 sessions active; set max_sessions"),
    ):
        play(OpenEnv(url, SMALL), lambda _: "done", count=1)
    assert refused == ["state", "reset"]


def test_no_more_sessions_are_open_than_the_server_has(openenv_server):
    opened = [0]

    class Counted(OpenEnv):
        def start(self) -> str:
            opened.append(opened[-1] + 1)
            return super().start()

        def close(self) -> None:
            super().close()
            opened.append(opened[-1] - 1)

    play(Counted(openenv_server, SMALL, max_sessions=1), lambda _: "done", count=3)
    assert max(opened) == 1
    with pytest.raises(ResourceError, match="1 attempts at a time, and a group has 2"):
        attempt(RunningEnv(OpenEnv(openenv_server, SMALL, max_sessions=1)), repeat, 1, group_size=2)


def test_a_server_with_a_single_session_is_noticed_before_training():
    sessions = threading.Semaphore(1)

    def one_at_a_time(socket: Any) -> None:
        if not sessions.acquire(blocking=False):
            socket.send(json.dumps({"type": "error", "data": CAPACITY}))
            return
        for _ in socket:
            socket.send(json.dumps({"type": "error", "data": {"message": "no state before a reset"}}))
        sessions.release()

    with served(one_at_a_time, ACTION) as url:
        assert RunningEnv(OpenEnv(url, SMALL)).max_episodes == 1


def test_the_tools_of_an_mcp_server_are_told_to_the_model():
    echo = {"name": "echo", "description": "Say it.", "input_schema": {"type": "object", "properties": {"text": {}}}}

    def handle(socket: Any) -> None:
        for raw in socket:
            action = json.loads(raw)["data"]
            data: dict[str, Any] = {"observation": {}, "reward": 0.0}
            if action.get("type") == "list_tools":
                data["observation"] = {"tools": [echo]}
            elif action.get("type") == "call_tool":
                data = {"observation": [action["tool_name"], action["arguments"]], "reward": 1.0, "done": True}
            socket.send(json.dumps({"type": "observation", "data": data}))

    schema = {"type": "object", "properties": {"type": {}, "tool_name": {}, "arguments": {}}}
    words = iter([Message("assistant", "", tool_calls=(ToolCall("c", "echo", {"text": "hi"}),)), "done"])
    with served(handle, schema) as url:
        (rollout,) = play(OpenEnv(url, SMALL), lambda _: next(words), count=1)
    assert rollout.tool_names == ("echo",)
    assert [m.text for m in rollout.messages if m.role == "tool"] == ['["echo", {"text": "hi"}]\nThe episode is over.']
    assert rollout.reward == 1.0


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
    with pytest.raises(ServiceError, match="is no OpenEnv server"):
        RunningEnv(OpenEnv("ws://127.0.0.1:9"))


class AttributeRubric:
    """Reads messages as verifiers 0.1.14 and later make them: by attribute and by key."""

    async def score_rollout(self, state: dict) -> None:
        last = state["completion"][-1]
        calls = [call.name for call in (last.tool_calls or ()) if last.role == last["role"] == "assistant"]
        state["reward"] = float(calls == ["echo"] and state["prompt"][0].role == "user")


def test_messages_of_verifiers_are_read_by_attribute_and_a_tool_environment_keeps_its_max_turns():
    def speak(messages: Sequence[Message]) -> Message:
        return Message("assistant", "", tool_calls=(ToolCall("c", "echo", {"text": "hi"}),))

    (rollout,) = play(VerifiersEnv(WithTools(AttributeRubric(), max_turns=1)), speak, count=1)
    assert rollout.reward == 1.0
    assert [m.role for m in rollout.messages] == ["user", "assistant"]
    assert rollout.stop == "answered"


def test_an_installed_environment_of_verifiers_is_loaded_by_its_name(monkeypatch):
    asked = []
    library = SimpleNamespace(load_environment=lambda name, **more: asked.append((name, more)) or SingleTurn())
    monkeypatch.setitem(sys.modules, "verifiers", library)
    running = load_env("verifiers:repeat", {"arguments": '{"level": 2}', "train_size": "9"})
    assert asked == [("repeat", {"level": 2})]
    assert running.name == "verifiers"
    assert running.env.config.train_size == 9
    with pytest.raises(NotFoundError, match="there is no environment 'verifers:repeat'"):
        load_env("verifers:repeat")


@pytest.mark.parametrize("error", [ImportError("No module 'textarena'"), AttributeError("no taskset"), SystemExit(1)])
def test_a_verifiers_package_that_cannot_be_loaded_is_told_with_its_reason(monkeypatch, error):
    def load_environment(name, **arguments):
        raise error

    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(load_environment=load_environment))
    with pytest.raises(UserCodeError, match=f"'wordle' cannot be loaded: {type(error).__name__}: {error}"):
        load_env("verifiers:wordle")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingPackageError, match=r"palestra\[gymnasium\]"):
        load_env("gymnasium:FrozenLake-v1")


class Toolset: ...


class TasksetWithTools(list):
    config = None

    @classmethod
    def toolsets(cls, config: Any) -> list:
        return [Toolset()]


class SkippedMetric(Task):
    def hooks(self, kind: str) -> list:
        def pass_rate(trace: Any, runtime: Any) -> float: ...

        return [pass_rate] if kind == "metric" else []


class Prepared(Task):
    async def setup(self, trace: Any, runtime: Any) -> None: ...


@pytest.mark.parametrize(
    ("taskset", "reason"),
    [
        (TasksetWithTools([Task(1)]), "its tool server Toolset"),
        ([SkippedMetric(1)], "a runtime for its metric pass_rate"),
        ([Prepared(1)], "a runtime that its setup prepares"),
    ],
)
def test_a_taskset_of_which_half_would_be_skipped_is_refused_before_training(taskset, reason):
    with pytest.raises(UnsupportedError, match=reason):
        RunningEnv(TasksetEnv(taskset))


@dataclass
class GroupRubric(Rubric):
    """The longest answer of a group wins: as verifiers score where a function takes `completions`."""

    has_group_rewards: bool = True

    async def score_rollout(self, state: dict) -> None:
        raise AssertionError("score_rollout requires no group-level reward functions")

    async def score_group(self, states: list[dict]) -> None:
        lengths = [len(state["completion"][-1]["content"]) for state in states]
        for state, length in zip(states, lengths, strict=True):
            state["reward"] = float(length == max(lengths))
            assert all(turn["reward"] is turn["advantage"] is None for turn in state["trajectory"])


@pytest.mark.parametrize(
    "rubric", [GroupRubric(), SimpleNamespace(rubrics=[GroupRubric()], score_group=GroupRubric().score_group)]
)
def test_a_rubric_with_a_function_of_the_group_scores_siblings_together(rubric):
    texts = iter(["a", "abc", "ab"])
    (group,) = attempt(RunningEnv(VerifiersEnv(SingleTurn(rubric))), lambda _: next(texts), 1, group_size=3)
    said = [rollout.messages[-1].text for rollout in group.rollouts]
    assert group.rewards == [float(text == "abc") for text in said]
