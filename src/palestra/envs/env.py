"""Env: the class that an environment of your own subclasses. Problems, tools, a score, and that is all.

Problems are sequences: drawn on demand, handed out one by one, or listed.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, overload

from pydantic import BaseModel, Field

from palestra.core.calls import user_code
from palestra.core.config_sections import Section
from palestra.core.errors import InputError, UserCodeError, text_of
from palestra.core.messages import as_messages
from palestra.core.time_limit import time_limit
from palestra.core.types import Message, Problem, Rollout, ToolResult
from palestra.envs.base import Split

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
    """An environment. The object is made once; every attempt gets a copy of it, so that what an attempt sets on `self`
    and the containers that `__init__` made stay its own. What `setup` loaded is shared and must not be changed.

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


_MAX_DRAWS = 500  # for one problem, before a split counts as empty
MAKE_LIMIT_S = 300.0  # for one problem


def as_problem(item: Any, problem_id: str) -> Problem:
    """A question, a pair, a dict with `input` and `expect`, or a Problem, as a Problem with an id.

    >>> as_problem(("What is 1 + 1?", 2), "p0")
    Problem(id='p0', input='What is 1 + 1?', expect=2, row={})
    """
    match item:
        case Problem():
            return item if item.id else replace(item, id=problem_id)
        case str():
            return Problem(problem_id, item)
        case (str() as text, expect):
            return Problem(problem_id, text, expect)
        case Mapping() if "input" in item:
            prompt = item["input"] if isinstance(item["input"], str) else as_messages(item["input"])
            return Problem(str(item.get("id", problem_id)), prompt, item.get("expect"), dict(item))
        case _:
            raise InputError(
                f"a problem is {item!r}; expected a question, a pair (question, expected), a dict with "
                "`input` and `expect`, or a Problem"
            )


def is_held_out(problem: Problem, share: float) -> bool:
    """Whether a problem belongs to the held-out share; it depends on the problem alone, so splits never overlap."""
    key = repr((problem.input, problem.expect)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") < share * 2**48


class NoProblem(UserCodeError):
    """A split has no problem to give."""


@dataclass(frozen=True)
class LazyProblems:
    """`size` problems of a split, each from its own random generator."""

    make: Callable[[random.Random], Any]
    split: Split
    size: int
    share: float
    seed: int

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Problem]:
        return (self[i] for i in range(self.size))

    def __getitem__(self, index: int) -> Problem:
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        for _ in range(_MAX_DRAWS):
            problem = as_problem(self.make(rng), f"{self.split}-{index}")
            if is_held_out(problem, self.share) == (self.split == "held_out"):
                return problem
        raise NoProblem(
            f"make_problem gave no problem for the {self.split} split in {_MAX_DRAWS} draws: it makes too few "
            "different ones. Make more, or set held_out_share"
        )


@dataclass
class Stream:
    """Problems handed out one after the other until None, dealt out to the splits."""

    next_item: Callable[[], Any]
    share: float
    dealt: dict[Split, list[Problem]] = field(default_factory=lambda: {"train": [], "held_out": []})
    ended: bool = False

    def take(self, split: Split, size: int) -> list[Problem]:
        """Up to `size` problems of a split; problems of the other split are kept for it."""
        most = len(self.dealt[split]) + _MAX_DRAWS * size
        while len(self.dealt[split]) < size and sum(map(len, self.dealt.values())) < most and not self.ended:
            item = self.next_item()
            if item is None:
                self.ended = True
            else:
                problem = as_problem(item, f"item-{sum(map(len, self.dealt.values()))}")
                self.dealt["held_out" if is_held_out(problem, self.share) else "train"].append(problem)
        return self.dealt[split][:size]


@dataclass
class ProblemList(Sequence[Problem]):
    """Problems by index, made when they are asked for. One that cannot be made has the reason as its error."""

    items: Any
    split: Split
    _made: dict[int, Problem] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if at not in self._made:
            problem_id = f"{self.split}-{at}"
            try:
                with time_limit(MAKE_LIMIT_S), user_code():
                    self._made[at] = as_problem(self.items[at], problem_id)
            except Exception as error:
                reason = text_of(error, f"making problem {problem_id}")
                self._made[at] = Problem(problem_id, "(this problem could not be made)", error=reason)
        return self._made[at]


def problem_list(items: Any, split: Split, limit: int) -> ProblemList:
    """The problems of an environment as a list: indexable things stay lazy, iterators are cut at `limit`."""
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
        items = list(itertools.islice(items, limit))
    if isinstance(items, LazyProblems):
        try:
            with time_limit(MAKE_LIMIT_S), user_code():
                items[0]
        except NoProblem:
            if split == "train":
                raise
            items = []  # too few different problems to hold any out: the training ones are scored instead
        except Exception:  # fails its own attempts
            pass
    return ProblemList(items, split)
