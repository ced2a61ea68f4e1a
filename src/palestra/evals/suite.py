"""A suite: cases to solve, and the measures that tell good from bad."""

from __future__ import annotations

import copy
import csv
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Self

from palestra.core.errors import (
    InputError,
    NotFoundError,
    PalestraError,
    SettingError,
    UnreadableFileError,
    needs_extra,
)
from palestra.core.messages import as_messages
from palestra.core.types import HELD_OUT_PREFIX, Message, Problem
from palestra.evals.measures import as_measures

Record = Mapping[str, Any]
InputFn = Callable[[Record], Any]
ExpectFn = Callable[[Record], Any]
ContextFn = Callable[[Record], Any]
MAX_FIELD_CHARS = 2**31 - 1  # of a CSV file


class SimulatedUser(Protocol):
    """A simulated user who continues the conversation after an answer; see `UserSimulator`."""

    async def reply(self, messages: Sequence[Message], case: Problem) -> str | None:
        """What the user says next; None ends the attempt."""
        ...


@dataclass(frozen=True)
class EvalSuite:
    """Cases and measures.

    >>> suite = EvalSuite.from_records([{"input": "2 + 2?", "expect": "4"}])
    >>> suite.cases[0].expect
    '4'
    """

    cases: Sequence[Problem]
    measures: Sequence[Any] = ()
    name: str = "suite"
    context_fn: ContextFn | None = None  # makes the state of one attempt, for tools with a Context parameter
    user: SimulatedUser | None = None  # answers the agent's messages; without one, the first answer ends the attempt

    def __post_init__(self) -> None:
        object.__setattr__(self, "cases", tuple(self.cases))
        object.__setattr__(self, "measures", as_measures(self.measures))
        if not self.cases:
            raise InputError(
                f"the suite {self.name!r} has no cases, so there is nothing to train on or to score. "
                "Give it at least one record: EvalSuite.from_records([{'input': …, 'expect': …}], measures=[…])."
            )
        ids = [case.id for case in self.cases]
        if len(set(ids)) < len(ids):
            twice = next(case_id for case_id in ids if ids.count(case_id) > 1)
            raise InputError(f"two cases of the suite {self.name!r} have the id {twice!r}; give each its own")

    def __len__(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.cases)

    @classmethod
    def from_records(
        cls,
        records: Iterable[Record],
        input_fn: InputFn | None = None,
        expect_fn: ExpectFn | None = None,
        measures: Sequence[Any] = (),
        name: str = "suite",
        context_fn: ContextFn | None = None,
        user: SimulatedUser | None = None,
    ) -> Self:
        """One case per record. `input_fn` gives the user's text or messages (default: record["input"]),
        `expect_fn` what the measures compare with (default: record.get("expect")), `context_fn` the state of an attempt
        at it, which tools take as a parameter of type Context and measures see as `ctx.context`. A `user`, such as
        `UserSimulator(…)`, answers the agent's messages."""
        cases = [
            Problem(
                id=f"{name}-{index}",
                input=_as_input(_apply(input_fn or itemgetter("input"), record, index, "input_fn"), index),
                expect=_apply(expect_fn or (lambda r: r.get("expect")), record, index, "expect_fn"),
                row=record,
            )
            for index, record in enumerate(records)
        ]
        return cls(cases, measures, name, context_fn, user)

    @classmethod
    def from_jsonl(cls, path: str | Path, input_fn: InputFn | None = None, **options: Any) -> Self:
        """One JSON object a line; empty lines are skipped."""
        records = []
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UnreadableFileError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise UnreadableFileError(f"{path}, line {number} is not a JSON object, got {type(record).__name__}")
            records.append(record)
        return cls.from_records(records, input_fn, **{"name": Path(path).stem, **options})

    @classmethod
    def from_csv(cls, path: str | Path, input_fn: InputFn | None = None, **options: Any) -> Self:
        """A CSV file with a header; every value is text."""
        reader = csv.DictReader(_lines(path))
        limit = csv.field_size_limit(MAX_FIELD_CHARS)  # its own is 131,072, less than a long document
        try:
            rows = [(reader.line_num, row) for row in reader]
        finally:
            csv.field_size_limit(limit)
        columns = list(reader.fieldnames or ())
        if twice := next((name for name in columns if columns.count(name) > 1), None):
            raise InputError(f"{path} has two columns {twice!r}; rename one")
        for line, row in rows:  # a longer row is most often a comma in a text: values would be in the wrong columns
            if None in row:
                raise UnreadableFileError(
                    f"{path}, line {line} has more values than the header has columns ({len(columns)}); put "
                    'texts with commas in quotes: "…, …"'
                )
        return cls.from_records([row for _, row in rows], input_fn, **{"name": Path(path).stem, **options})

    @classmethod
    def from_parquet(cls, path: str | Path, input_fn: InputFn | None = None, **options: Any) -> Self:
        """A Parquet file, a row a case."""
        with needs_extra("reading Parquet", "data"):
            import pyarrow.parquet
        if not Path(path).exists():
            raise NotFoundError(f"there is no file {path}")
        try:
            records = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise UnreadableFileError(f"{path} cannot be read as Parquet: {error}") from None
        return cls.from_records(records, input_fn, **{"name": Path(path).stem, **options})

    @classmethod
    def from_hf_dataset(
        cls, path_or_dataset: Any, input_fn: InputFn | None = None, *, split: str = "train", **options: Any
    ) -> Self:
        """A Hugging Face dataset; of several splits, or by a name on the hub, its `split`."""
        if isinstance(path_or_dataset, (str, Path)):
            with needs_extra("loading a dataset by name", "data"):
                from datasets import load_dataset
            name = Path(path_or_dataset).name
            return cls.from_records(
                load_dataset(str(path_or_dataset), split=split), input_fn, **{"name": name, **options}
            )
        if isinstance(path_or_dataset, Mapping):  # a DatasetDict, as load_dataset gives without a split
            if split not in path_or_dataset:
                known = ", ".join(map(str, path_or_dataset))
                raise NotFoundError(f"the dataset has no split {split!r}; it has {known}: from_hf_dataset(…, split=…)")
            path_or_dataset = path_or_dataset[split]
        return cls.from_records(path_or_dataset, input_fn, **options)

    def context_of(self, case: Problem) -> Any:
        """A new context for an attempt at a case, from a copy of its record; None without `context_fn`."""
        return None if self.context_fn is None else self.context_fn(copy.deepcopy(case.row))

    def split(self, held_out: float = 0.2, seed: int = 0) -> tuple[Self, Self]:
        """(train, held-out), drawn by `seed`; both keep the order of the cases."""
        if not 0.0 < held_out < 1.0:
            raise SettingError(f"held_out={held_out}; expected a share between 0 and 1, for example 0.2")
        if len(self) < 2:
            raise InputError(f"the suite {self.name!r} has one case, which cannot be split; give it two or more")
        count = min(max(round(held_out * len(self)), 1), len(self) - 1)
        chosen = set(random.Random(seed).sample(range(len(self)), count))
        train = [case for i, case in enumerate(self.cases) if i not in chosen]
        return replace(self, cases=train), replace(self, cases=[self.cases[i] for i in sorted(chosen)])


def require_suite(suite: Any) -> None:
    if not isinstance(suite, EvalSuite):
        raise InputError(
            f"the suite is a {type(suite).__name__}; make one of it: EvalSuite.from_records(rows, measures=[…]), or "
            "EvalSuite.from_hf_dataset(dataset, …)"
        )


def hold_out(suite: EvalSuite, held_out: EvalSuite | float | None) -> tuple[EvalSuite, EvalSuite | None]:
    """(train, held-out) for a held-out suite or a share. None is held out by 0 or None, or of a suite of one case.

    Held-out cases that share an id with other training cases get another one, so that an id means one case.
    """
    require_suite(suite)
    if isinstance(held_out, EvalSuite):
        trained = {case.id: case for case in suite}
        if any(trained.get(case.id, case) is not case for case in held_out):
            held_out = replace(held_out, cases=[replace(c, id=HELD_OUT_PREFIX + c.id) for c in held_out])
        return suite, held_out
    if held_out is None or held_out == 0 or (len(suite) == 1 and isinstance(held_out, float)):
        return suite, None
    if not isinstance(held_out, float):
        raise InputError(f"held_out is a {type(held_out).__name__}; expected an EvalSuite, a share, or 0 for none")
    return suite.split(held_out)


def _apply(fn: Callable[[Record], Any], record: Record, index: int, what: str) -> Any:
    if not isinstance(record, Mapping):
        raise InputError(f"record {index} is of type {type(record).__name__}; expected a dict such as {{'input': …}}")
    try:
        return fn(record)
    except KeyError as error:
        raise InputError(
            f"record {index} has no {error}; its keys are {', '.join(map(str, record))}. "
            f"Rename one, or pass {what}=lambda record: record['…'] with the right one."
        ) from None


def _as_input(value: Any, index: int) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value:
        try:
            return as_messages(value)
        except PalestraError as error:
            raise InputError(f"record {index}: {error}") from None
    raise InputError(f"input_fn gave {value!r} for record {index}; expected a text or a list of messages")


def _lines(path: str | Path) -> Iterable[str]:
    """The lines as JSON and CSV know them: str.splitlines would also split at U+2028 inside of a text."""
    try:
        return io.StringIO(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UnreadableFileError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8"
        ) from None
