"""Env: the class that an environment of your own subclasses. Problems, tools, a score, and that is all."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.core.config_sections import Section
from palestra.core.types import Message, Problem, Rollout, ToolResult
from palestra.envs.base import Split
from palestra.envs.problems import LazyProblems, Stream

_HELD_OUT_SEED = 1_000_000


class EnvConfig(Section):
    """The settings of every environment; subclass it for more: `--env.train_size 200`."""

    seed: int = Field(0, ge=0, description="the same seed gives the same problems")
    train_size: int = Field(
        1000, ge=1, le=100_000_000, description="problems to train on, where the environment makes them"
    )
    held_out_size: int = Field(100, ge=1, le=1_000_000, description="problems kept aside for evaluation")
    held_out_share: float = Field(0.2, gt=0, lt=1, description="share of all possible problems that are held out")


def seeded_problems(config: EnvConfig, split: Split, question: str) -> list[Problem]:
    """Problems of an environment that makes them itself, from the seed in each problem's row."""
    first = config.seed + (0 if split == "train" else _HELD_OUT_SEED)
    size = config.train_size if split == "train" else config.held_out_size
    return [Problem("", question, row={"seed": seed}) for seed in range(first, first + size)]


class Env:
    """An environment. The object is made once; every attempt gets a shallow copy of it, so that what an
    attempt sets on `self` stays its own, while what `setup` loaded is shared and must not be changed.

        class Sums(Env):
            \"\"\"Add two numbers.\"\"\"

            def make_problem(self, rng):
                a, b = rng.randint(1, 99), rng.randint(1, 99)
                return f"What is {a} + {b}?", a + b          # what the user says, what is expected

            def add(self, a: int, b: int) -> int:            # a public method is a tool
                \"\"\"Add two numbers.\"\"\"
                return a + b

            def score(self, answer):
                return answer.strip(" .").endswith(str(self.problem.expect))

    An exception in a method fails its attempt, and the run continues.
    """

    name: ClassVar[str] = ""  # default: the class's name, in small letters
    instructions: str = ""  # the system message
    env_config_cls: ClassVar[type[BaseModel]] = EnvConfig
    reward_weights: Mapping[str, float] = {}  # where `score` gives several: how they add up; 1 each unless named
    pass_threshold: float = 1.0  # a score of at least this counts as passed
    scores_are_bounded: bool = True  # False: rewards of another library, which need not lie in 0..1
    max_turns: int | None = None  # messages of the model in an attempt; None: as many as the run's limits allow
    max_episodes: int | None = None  # attempts that may be open at a time; None: any number
    works_in_forks: bool = (
        False  # attempts share no connection, open file or lock: `rollout.workers` is chosen by itself
    )
    run_settings: ClassVar[Mapping[str, Any]] = {}  # settings of a training that suit it: {"train.learning_rate": 1e-3}

    problem: Problem  # during an attempt: what is being solved,
    messages: Sequence[Message] = ()  # the conversation so far,
    tool_results: Sequence[ToolResult] = ()  # and, when it is scored, what the tools answered

    def __init__(self, config: Any = None) -> None:
        self.config: Any = self.config_init() if config is None else config
        self._stream: Stream | None = None

    @classmethod
    def config_init(cls) -> Any:
        """The config that this environment starts from; the command line changes single fields of it."""
        return cls.env_config_cls()

    def setup(self) -> None:
        """Load what all attempts share. Called once, before the first problem."""

    def make_problem(self, rng: random.Random) -> Any:
        """One problem: a question, a pair (question, expected), a dict with `input` and `expect`, or a Problem."""
        raise NotImplementedError(f"{type(self).__name__} needs make_problem(self, rng), or problems(self, split)")

    def problems(self, split: Split) -> Iterable[Any]:
        """The problems of a split: a list, or an iterator, which may be endless. By default `make_problem` draws them,
        or `get_next_item()` hands them out one after the other, and a share of all that there can be is held out."""
        size = self.config.train_size if split == "train" else self.config.held_out_size
        share = self.config.held_out_share
        next_item = getattr(self, "get_next_item", None)
        if next_item is not None:
            self._stream = self._stream or Stream(next_item, share)
            return self._stream.take(split, size)
        return LazyProblems(self.make_problem, split, size, share, self.config.seed)

    def start(self) -> str | None:
        """Begin an attempt at `self.problem`, on its own copy of the environment; a text is added to the question."""
        return None

    def tools(self) -> Sequence[Any]:
        """The tools of an attempt: by default all public methods that the subclass adds."""
        return [getattr(self, name) for name in tool_methods(type(self))]

    def step(self, answer: str) -> str | None:
        """The reply to an answer without tool calls; None ends the attempt."""
        return None

    def score(self, answer: str) -> Any:
        """The score of the attempt: a bool, a number in 0..1, pass_reason(…), fail_reason(…), or a dict of several."""
        if type(self).score_group is Env.score_group:
            raise NotImplementedError(f"{type(self).__name__} needs score(self, answer)")
        return {}

    def score_turns(self) -> Any:
        """More scores, of single turns: a number for each message of the model in this attempt, in order, or a dict of
        several such lists. They are added to the reward, and `train.credit` can tell the turns apart by them."""
        return None

    def state_key(self) -> Any:
        """A key of the state that the attempt is in, before each message of the model: attempts at one problem with
        equal keys are in the same state (`train.credit = gigpo`). None: states with equal observations are."""
        return None

    def score_group(self, attempts: Sequence[Env]) -> Any:
        """Scores of siblings that are judged against each other: a list with a value, as of `score`, for each of these
        attempts at one problem. They are added to those of `score`. None: each is scored alone. May be async."""
        return None

    def close(self) -> None:
        """End an attempt: give back what `start` took."""

    def evaluate(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        """More numbers about the held-out attempts than their pass rate."""
        return {}


def env_name(cls: type[Env]) -> str:
    """The name of an environment: its own `name`, or its class's."""
    return str(cls.__dict__.get("name") or default_name(cls.__name__))


def default_name(class_name: str) -> str:
    """
    >>> default_name("GuessTheNumberEnv")
    'guess-the-number'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", class_name).lower()
    return words.removesuffix("-environment").removesuffix("-env")


_tool_methods: dict[type[Env], list[str]] = {}  # of classes that were asked for: every attempt asks


def tool_methods(cls: type[Env]) -> list[str]:
    """The public methods that a subclass of Env adds, in the order of their definition."""
    if cls not in _tool_methods:
        names: dict[str, None] = {}
        for parent in reversed(cls.__mro__):
            if issubclass(parent, Env) and parent is not Env:
                names |= {name: None for name, member in parent.__dict__.items() if inspect.isfunction(member)}
        added = [n for n in names if not n.startswith("_") and n != "get_next_item" and not hasattr(Env, n)]
        _tool_methods[cls] = added
    return _tool_methods[cls]
