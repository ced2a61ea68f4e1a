"""Environments of the verifiers library, both generations: `load_environment` with a Rubric, and v1 Tasksets.

    RunningEnv(VerifiersEnv(verifiers.load_environment("gsm8k")))
    RunningEnv(TasksetEnv(GSM8KTaskset(config)))

Neither imports verifiers: whatever has the same methods will do.
"""

from __future__ import annotations

import inspect
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from palestra.core.errors import UnsupportedError, UserCodeError
from palestra.core.messages import as_messages, to_dict
from palestra.core.types import Message, Problem
from palestra.envs.base import Split
from palestra.envs.env import Env, EnvConfig, is_held_out


class VerifiersEnv(Env):
    """An environment of the first generation: single-turn, multi-turn or with stateless tools."""

    name = "verifiers"
    scores_are_bounded = False

    def __init__(self, environment: Any, config: EnvConfig | None = None) -> None:
        super().__init__(config)
        self.theirs = environment
        self.state: dict[str, Any] = {}
        self._is_ready = False
        turns = int(getattr(environment, "max_turns", -1))
        self.max_turns = turns if turns > 0 else None
        if hasattr(environment, "harness"):
            raise UnsupportedError(
                f"{type(environment).__name__} plays and scores its attempts by a harness of its own, which this "
                "adapter has not; run it with verifiers against `palestra serve`, or write it as a palestra.Env"
            )
        if hasattr(environment, "update_tool_args"):
            raise UnsupportedError(
                f"{type(environment).__name__} fills in arguments of its tools itself, which is not supported; "
                "serve it as an environment of its own, or write it as a palestra.Env"
            )

    def problems(self, split: Split) -> Sequence[Problem]:
        train = [self._problem(row) for row in self.theirs.get_dataset(self.config.train_size)]
        held_out = [self._problem(row) for row in self.theirs.get_eval_dataset(self.config.held_out_size)]
        inputs = {p.input for p in held_out}
        if inputs <= {p.input for p in train}:  # it has none of its own, and gave the training ones
            return [p for p in train if is_held_out(p, self.config.held_out_share) == (split == "held_out")]
        return held_out if split == "held_out" else [p for p in train if p.input not in inputs]

    def _problem(self, row: Mapping[str, Any]) -> Problem:
        return Problem("", _messages(row["prompt"]), row.get("answer"), dict(row))

    def start(self) -> None:
        row = self.problem.row
        self._is_ready = False
        self.state = {
            "input": dict(row), "prompt": _as_theirs(_messages(row["prompt"])), "completion": [],
            "answer": row.get("answer", ""), "task": row.get("task", "default"), "info": row.get("info") or {},
            "example_id": row.get("example_id", 0),
            "trajectory": [], "turn": 0, "responses": [], "is_completed": False, "reward": None, "metrics": None,
            "timing": _Timing(),
        }  # fmt: skip

    def tools(self) -> Sequence[Any]:
        return list(getattr(self.theirs, "tools", None) or [])

    async def step(self, answer: str) -> Any:  # type: ignore[override]
        if getattr(self.theirs, "max_turns", -1) == 1 or self.tools() or not hasattr(self.theirs, "env_response"):
            return None
        messages = await self._record()
        for condition in self.theirs._stop_conditions:
            stops = condition(self.state)
            if await stops if inspect.isawaitable(stops) else stops:
                return None
        reply = await self.theirs.env_response(messages, self.state)
        return _messages(reply) if reply and not self.state.get("final_env_response") else None

    async def score(self, answer: str) -> dict[str, float]:
        await self._record()
        if _has_group_rewards(self.theirs.rubric):
            return {}
        await self.theirs.rubric.score_rollout(self.state)
        return {"reward": float(self.state["reward"])}

    async def score_group(self, attempts: Sequence[Any]) -> list[dict[str, float]] | None:
        """A Rubric with a function of the whole group scores siblings together, with its other functions."""
        rubric = self.theirs.rubric
        if not _has_group_rewards(rubric):
            return None
        states = [attempt.state for attempt in attempts]
        await rubric.score_group(states)
        return [{"reward": float(state["reward"])} for state in states]

    async def _record(self) -> list[Any]:
        """Put the conversation so far into the state, where verifiers' methods read it."""
        if not self._is_ready:
            self._is_ready = True
            if hasattr(self.theirs, "setup_state"):
                self.state = await self.theirs.setup_state(self.state) or self.state
        messages = _as_theirs([message for message in self.messages if message.role != "system"])
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        first = replies[0] if replies else len(messages)
        self.state["completion"] = messages[first:]
        self.state["turn"] = len(replies)
        self.state["trajectory"] = [
            {"prompt": messages[:i], "completion": [messages[i]], "reward": None, "advantage": None} for i in replies
        ]
        return messages


def _has_group_rewards(rubric: Any) -> bool:
    """Whether a function of a Rubric, or of a nested one, scores whole groups."""
    inner = getattr(rubric, "rubrics", ())
    return bool(getattr(rubric, "has_group_rewards", False)) or any(map(_has_group_rewards, inner))


class _Timing(dict[str, float]):
    """Where they note durations: by key in some versions, by attribute in others. They are not used here."""

    def __missing__(self, key: str) -> float:
        return 0.0

    def __getattr__(self, name: str) -> _Timing:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = _Timing()
        return self.__dict__[name]


@dataclass
class Trace:
    """A conversation as a v1 task reads it when it scores, and the verdicts that it records."""

    task: Any
    messages: Sequence[Any]
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    state: Any = field(default_factory=SimpleNamespace)
    agent: Any = field(default_factory=SimpleNamespace)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    stop_condition: str | None = "agent_completed"
    is_completed: bool = True
    ok: bool = True
    errors: Sequence[Any] = ()

    @property
    def assistant_messages(self) -> list[Any]:
        return [m for m in self.messages if m["role"] == "assistant"]

    @property
    def tool_messages(self) -> list[Any]:
        return [m for m in self.messages if m["role"] == "tool"]

    @property
    def last_message(self) -> Any:
        return self.messages[-1]

    @property
    def last_reply(self) -> str:
        replies = self.assistant_messages
        return (replies[-1]["content"] or "").strip() if replies else ""

    @property
    def transcript(self) -> str:
        return "\n\n".join(f"[{m['role']}]\n{m['content']}" for m in self.messages if m["role"] != "tool")

    @property
    def num_turns(self) -> int:
        return len(self.assistant_messages)

    @property
    def reward(self) -> float:
        return float(sum(value for value in self.rewards.values() if value is not None))

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = float(value) * float(weight)

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def record_metrics(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.record_metric(name, value)


class TasksetEnv(Env):
    """A v1 Taskset whose tasks are one question each, scored by what was said."""

    name = "taskset"
    scores_are_bounded = False

    def __init__(self, taskset: Any, config: EnvConfig | None = None) -> None:
        super().__init__(config)
        self.taskset = taskset

    def setup(self) -> None:
        """Refuse what a conversation alone cannot play or score, before anything is trained on half of it."""
        task = next(iter(self.taskset))
        needs = [] if task.data.prompt is not None else ["a user who opens the conversation"]
        needs += ["a container"] if getattr(task, "NEEDS_CONTAINER", False) else []
        needs += _toolsets(task)
        hooks = getattr(task, "hooks", lambda kind: ())
        for kind in ("metric", "reward"):
            for function in hooks(kind):
                runtime = inspect.signature(function).parameters.get("runtime")
                if runtime is not None and runtime.default is inspect.Parameter.empty:
                    needs.append(f"a runtime for its {kind} {function.__name__}")
        needs += ["a judge model"] if getattr(task.config, "judges", None) else []
        own = [c for c in type(task).__mro__ if "setup" in vars(c) and not c.__module__.startswith("verifiers.v1.task")]
        needs += ["a runtime that its setup prepares"] if own else []
        if missing := [*_toolsets(self.taskset), *needs]:
            raise UnsupportedError(
                f"{type(task).__name__} needs {', '.join(missing)}, which this adapter has not; run it with verifiers' "
                "own harness against `palestra serve`, or write it as a palestra.Env"
            )

    def problems(self, split: Split) -> Sequence[Problem]:
        problems: list[Problem] = []
        size = self.config.train_size if split == "train" else self.config.held_out_size
        for task in self.taskset:
            problem = self._problem(task)
            if is_held_out(problem, self.config.held_out_share) == (split == "held_out"):
                problems.append(problem)
            if len(problems) == size:
                break
        return problems

    def _problem(self, task: Any) -> Problem:
        opening = [Message("system", task.data.system_prompt)] if task.data.system_prompt else []
        return Problem("", (*opening, *_messages(task.data.prompt)), row={"task": task})

    async def score(self, answer: str) -> dict[str, float]:
        task = self.problem.row["task"]
        trace = Trace(task, [AttributeDict.of(message) for message in self.messages])
        await task.score(trace, None)
        if not any(value is not None for value in trace.rewards.values()):
            raise UserCodeError(f"{type(task).__name__} has no reward that can be given without a runtime")
        return {"reward": trace.reward}


def _toolsets(owner: Any) -> list[str]:
    """The tool servers of a Task or a Taskset, which only verifiers' own harness runs."""
    of = getattr(type(owner), "toolsets", None)
    return [f"its tool server {type(toolset).__name__}" for toolset in (of(owner.config) if of else ())]


class AttributeDict(dict[str, Any]):
    """A message or tool call that is read by key or by attribute, as verifiers' own are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    @classmethod
    def of(cls, message: Message) -> AttributeDict:
        row = cls(to_dict(message, arguments_as_text=True))
        if calls := row.get("tool_calls"):
            row["tool_calls"] = [cls({**call, **call["function"]}) for call in calls]
        return row


def _as_theirs(messages: Sequence[Message]) -> list[Any]:
    """Messages of the installed verifiers, which reward functions may test by type; or the like of them."""
    library = sys.modules.get("verifiers.utils.message_utils")
    if (make := getattr(library, "from_raw_message", None)) is not None:
        return [make(to_dict(message, arguments_as_text=True)) for message in messages]
    return [AttributeDict.of(message) for message in messages]


def _messages(value: Any) -> tuple[Message, ...]:
    """Texts, dicts or the pydantic messages of verifiers, as ours."""
    if isinstance(value, str):
        return as_messages(value)
    return as_messages([item.model_dump() if hasattr(item, "model_dump") else item for item in value])
