"""Every dataset of reasoning-gym: `reasoning_gym/<task>`; it is imported when a problem is made: that takes seconds."""

from __future__ import annotations

import atexit
import importlib
import itertools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.core.errors import (
    InputError,
    MissingPackageError,
    NotFoundError,
    SettingError,
    UnsupportedError,
    UserCodeError,
    did_you_mean,
)
from palestra.core.types import Message, Problem, Score
from palestra.envs.base import Split
from palestra.envs.child_process import ChildFailed, ChildProcess
from palestra.envs.env import Env, EnvConfig, is_held_out

_SEEDS_APART = 1_000_003  # datasets add the index to the seed
_EXAMPLES_SEED = 77_777_777
_MAX_DRAWS = 60
_ANSWER = ("<answer>", "</answer>")
_NAME = re.compile(r'^DATASET_NAME\s*=\s*["\']([\w-]+)["\']', re.MULTILINE)
_REGISTERED = re.compile(r'^register_dataset\(\s*(?:["\']([\w-]+)["\']|DATASET_NAME)', re.MULTILINE)
_ANSWER_S = 5.0
_START_S = 120.0  # importing the library takes seconds, more on a busy machine
_NOT_A_TASK = {"composite"}  # a mixture of others, that has to be put together first

# tasks whose scorer gives wrong answers the full score, as of reasoning-gym 0.1.25: training on them teaches nothing
WRONG_SCORERS = {
    "coin_flip": "the answer 0 scores 1.0 whenever the right one begins with 0",
    "game_of_life_halting": "every answer scores 1.0",
}


@cache
def task_names() -> tuple[str, ...]:
    """The names of all datasets of the installed reasoning-gym; none when it is not installed."""
    spec = find_spec("reasoning_gym")
    names: set[str] = set()
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            declared = _NAME.search(text)
            names |= {literal or (declared[1] if declared else "") for literal in _REGISTERED.findall(text)}
    return tuple(sorted(names - _NOT_A_TASK - {""}))


class ScorerProcess:
    """Scores answers by `dataset.score_answer` in one child process, which stays warm and is restarted if it fails."""

    def __init__(self, timeout_s: float = _ANSWER_S) -> None:
        self._timeout_s = timeout_s
        self._child = ChildProcess(Path(__file__).with_name("scorer_child.py"))
        self._lock = threading.Lock()

    def score(self, task: str, settings: Mapping[str, Any], answer: str, entry: Any) -> float:
        """The library's score; ChildFailed with the reason where it gives none."""
        with self._lock:  # a request that restarted the process would wait for its import
            if not self._child.is_running:
                self._start()
            request = {"task": task, "settings": dict(settings), "answer": answer, "entry": entry}
            return float(self._child.ask("score", self._timeout_s, **request))

    def _start(self) -> None:
        """Import the library; `chain_sum` with any answer is scored whatever the library's version."""
        first = {"task": "chain_sum", "settings": {"seed": 0, "size": 1}, "answer": "", "entry": {"answer": "0"}}
        try:
            self._child.ask("score", _START_S, **first)
        except ChildFailed as error:
            raise UserCodeError(f"the process that scores answers cannot run reasoning-gym: {error}") from None

    def close(self) -> None:
        self._child.close()


scorer = ScorerProcess()
atexit.register(scorer.close)


class ReasoningGymConfig(EnvConfig):
    """Which dataset, and how it is set."""

    task: str = Field("leg_counting", description="the dataset's name")
    options: dict[str, Any] = Field(default_factory=dict, description="settings of the dataset itself, as JSON")
    shots: int = Field(0, ge=0, le=16, description="solved problems shown before each one, for models that need them")
    answer_tags: bool = Field(True, description="the answer stands in <answer> tags; false: the whole reply is it")


class ReasoningGym(Env):
    """A dataset of reasoning-gym."""

    name = "reasoning_gym"
    instructions = "Solve the problem. Put your final answer, and nothing else, between <answer> and </answer>."
    bare_instructions = "Solve the problem. Reply with the answer only."
    env_config_cls: ClassVar[type[BaseModel]] = ReasoningGymConfig

    def setup(self) -> None:
        task = self.config.task
        if not task_names():
            raise MissingPackageError("reasoning-gym is not installed; pip install 'palestra[reasoning-gym]'")
        if task not in task_names():
            raise NotFoundError(f"reasoning-gym has no dataset {task!r}.{did_you_mean(task, task_names())}")
        if task in WRONG_SCORERS:
            raise UnsupportedError(f"the scorer of {task} is wrong: {WRONG_SCORERS[task]}; choose another dataset")
        self.datasets: list[Any] = []
        self.dataset(0)
        if not self.config.answer_tags:
            self.instructions = self.bare_instructions
        self.shown = tuple(self._solved())

    def dataset(self, number: int) -> Any:
        """One of as many datasets of the same kind as are asked for, each with other entries."""
        while len(self.datasets) <= number:
            library = importlib.import_module("reasoning_gym")
            self.datasets.append(library.create_dataset(self.config.task, **self._settings(len(self.datasets))))
        return self.datasets[number]

    def _settings(self, number: int = 0) -> dict[str, Any]:
        size = max(self.config.train_size, self.config.held_out_size)
        return {"seed": self.config.seed + _SEEDS_APART * number, "size": size, **self.config.options}

    def problems(self, split: Split) -> Sequence[Problem]:
        return _Entries(self, split)

    def _solved(self) -> Iterator[Message]:
        """The examples as turns of a conversation; they are training problems, the same ones for every seed."""
        if not self.config.shots:
            return
        library = importlib.import_module("reasoning_gym")
        entries = library.create_dataset(self.config.task, seed=_EXAMPLES_SEED, size=200, **self.config.options)
        share = self.config.held_out_share
        training = (e for e in entries if not is_held_out(Problem("example", e["question"], e["answer"]), share))
        for entry in itertools.islice(training, self.config.shots):
            if entry["answer"] is None:
                raise SettingError(f"{self.config.task} names no right answer that could be shown; set env.shots to 0")
            answer = str(entry["answer"])
            yield Message("user", entry["question"])
            yield Message("assistant", answer.join(_ANSWER) if self.config.answer_tags else answer)

    def score(self, answer: str) -> Score:
        text = answer.strip()
        if self.config.answer_tags:
            _, tag, rest = text.rpartition(_ANSWER[0])
            text = rest.partition(_ANSWER[1])[0].strip() if tag else ""
        if not text:
            return Score(0.0, False, f"there is no answer{' in <answer> tags' if self.config.answer_tags else ''}")
        try:
            value = scorer.score(self.config.task, self._settings(), text, self.problem.row["entry"])
        except ChildFailed as failure:
            return Score(0.0, False, f"it cannot be scored: {failure}")
        value = min(max(value, 0.0), 1.0)
        return Score(value, value >= self.pass_threshold - 1e-9, f"expected {self.problem.expect}")


class _Entries(Sequence[Problem]):
    """Entries as problems of one split, made when they are asked for; no question is in both splits."""

    def __init__(self, env: ReasoningGym, split: Split) -> None:
        self._env, self._split = env, split

    def __len__(self) -> int:
        config = self._env.config
        return int(config.train_size if self._split == "train" else config.held_out_size)

    def __getitem__(self, index: Any) -> Any:
        for number in range(_MAX_DRAWS):
            entry = self._env.dataset(number)[index]
            problem = Problem(f"{self._split}-{index}", entry["question"], entry["answer"], {"entry": entry})
            if is_held_out(problem, self._env.config.held_out_share) == (self._split == "held_out"):
                shown = self._env.shown
                return replace(problem, input=(*shown, Message("user", entry["question"]))) if shown else problem
        raise InputError(f"{self._env.config.task} has too few different questions to hold some out")
