"""The data that flows through Palestra: Turn -> Rollout -> Group -> Sample.

Tokens are the truth: what the model sampled is trained as exactly those ids, and text is
derived from tokens, never the reverse. All texts are made `encodable` when they enter.

    >>> prompt = Turn("template", (1, 2, 3))
    >>> call = Turn("model", (7, 8), logprobs=(-0.1, -0.7), versions=4)
    >>> result = Turn("environment", (9,))
    >>> [t for turn in (prompt, call, result) for t in turn.token_ids.tolist()]
    [1, 2, 3, 7, 8, 9]
    >>> call.versions.tolist()
    [4, 4]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from palestra.core.text import as_text, encodable, shorten

Array = np.ndarray[Any, Any]
Maker = Literal["model", "environment", "template"]
Finish = Literal["stop", "length", "cancelled"]
StopReason = Literal["answered", "truncated", "context_full", "tool_limit", "failed"]
HELD_OUT_PREFIX = "held_out/"  # of the ids of held-out cases, where training cases have the same ids
CUT_OFF = ("truncated", "context_full")
MAX_REASON_CHARS = 20_000  # of a score


_set = object.__setattr__  # the dataclasses are frozen
_VERSIONS = attrgetter("versions")


def _make_encodable(self: Any, *names: str) -> None:
    for name in names:
        value = getattr(self, name)
        if value and not (type(value) is str and value.isascii()):
            _set(self, name, encodable(value))


def _set_array(self: Any, name: str, kind: Any, count: int) -> None:
    """Make a field a read-only array; one number stands for `count` equal ones. The caller's array stays writable."""
    values = getattr(self, name)
    if type(values) is np.ndarray and values.dtype == kind and values.ndim == 1 and not values.flags.writeable:
        return
    if isinstance(values, int | float):
        values = np.full(count, values, kind)
    array = values.astype(kind, copy=False) if isinstance(values, np.ndarray) else np.array(values, kind)
    if array.ndim == 0:
        array = np.full(count, array)
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    _set(self, name, array)


class _EqualByArrays:
    """A dataclass with arrays, which is compared field by field; NaN equals NaN."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        for f in fields(self):  # type: ignore[arg-type]
            x, y = getattr(self, f.name), getattr(other, f.name)
            if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
                is_equal = np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
            else:
                is_equal = not isinstance(x, np.ndarray) and not isinstance(y, np.ndarray) and x == y
            if not is_equal:
                return False
        return True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for. `error` is set when its text could not be read as one."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    format: str = field(default="", repr=False)  # name of the call format, if it is not the model's own

    def __post_init__(self) -> None:
        _make_encodable(self, "id", "name", "arguments", "error")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came back from one call: the text that the model reads."""

    call: ToolCall
    content: str
    ok: bool = True
    seconds: float = 0.0
    raised: bool = False  # not ok because the tool raised or hung, rather than for a wrong call


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `text` is what a reader sees; tool calls are apart from it.

    `reasoning` is what the model thought before the text. It is not sent back, stored or compared.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        _make_encodable(self, "text", "tool_call_id", "name", "reasoning")


class Column(NamedTuple):
    """What a policy says of each token that it samples. A field of `Turn` that `column` declares.

    `COLUMNS` is the table of them: records, the batch and micro-batches go over it, and name no column themselves.
    """

    name: str
    dtype: Any
    default: Any  # one number for all tokens, where a policy gives none; (): the policy must give it
    fill: float  # in a batch, of tokens that the model did not sample
    decimals: int | None  # in a line of rollouts.jsonl; None: only exact records have it
    in_loss: bool  # whether micro-batches have it, as float32, for the loss
    empty: Array  # of a turn that the model did not make


def column(dtype: Any, default: Any, *, fill: float = 0, decimals: int | None = None, in_loss: bool = True) -> Any:
    """A field of `Turn` that is a `Column`."""
    empty = np.zeros(0, dtype)
    empty.setflags(write=False)
    return field(default=default, metadata={"column": (dtype, default, fill, decimals, in_loss, empty)})


@dataclass(frozen=True, slots=True, eq=False)
class Turn(_EqualByArrays):
    """A run of token ids with one maker, and the columns of the tokens that the model sampled.

    `model` tokens were sampled: they carry the sampler's logprobs (under the distribution sampled from), the
    policy version that made each, and why the turn ended. `environment` tokens are the body of a tool result or
    of an environment's reply, `template` tokens are prompt and chat scaffold; the columns of both are empty.
    `routing` are the experts, in a mixture of experts, of the tokens before the last one of the turn that were computed
    since the turn before: n tokens, the last of them the last but one of the turn. The largest number of its dtype
    stands for unknown ones.
    Any sequence is accepted for an array, and one number for all tokens of a column.
    """

    maker: Maker
    token_ids: Array  # [n] int32
    logprobs: Array = column(np.float32, (), decimals=6)  # NaN: unknown
    versions: Array = column(np.int32, 0, in_loss=False)
    finish: Finish | None = None
    routing: Array | None = None  # [n, layers, k] uint8 or int16; None: not recorded

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        expected = count if self.maker == "model" else 0
        _set_array(self, "token_ids", np.int32, count)
        for name, dtype, default, empty in _KINDS:
            if not expected and getattr(self, name) is default:
                _set(self, name, empty)
                continue
            _set_array(self, name, dtype, expected)
            if (given := len(getattr(self, name))) != expected:
                raise ValueError(f"a {self.maker} turn of {count} tokens has {given} {name}; expected {expected}")

    def __repr__(self) -> str:
        return f"Turn({self.maker!r}, {len(self.token_ids)} tokens, finish={self.finish!r})"


COLUMNS = tuple(Column(f.name, *f.metadata["column"]) for f in fields(Turn) if "column" in f.metadata)
_KINDS = tuple((c.name, c.dtype, c.default, c.empty) for c in COLUMNS)  # turns are made by the thousand


class Matching:
    """The state of a grammar in one turn: which tokens may come next."""

    def allowed(self) -> bytes | None:
        """A bit for each token id, the lowest first; None when every token may come next."""
        raise NotImplementedError

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""
        raise NotImplementedError


class Grammar:
    """What a turn may contain, compiled from `SamplingParams.grammar`. Each turn has its own `Matching`."""

    def start(self) -> Matching:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn, by default the model's own distribution. `grammar` is text, for policies elsewhere."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    grammar: str | None = None

    @property
    def only_temperature(self) -> bool:
        """Whether temperature alone shapes the distribution: no truncation, penalty or grammar does."""
        truncates = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return not truncates and self.repetition_penalty == 1.0 and self.grammar is None

    def for_turn(self, max_new_tokens: int, seed: int) -> SamplingParams:
        """The same with these two. `dataclasses.replace` takes twice as long, and every turn has its own."""
        shape = (self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty)
        return SamplingParams(max_new_tokens, *shape, self.stop_token_ids, self.stop, seed, self.grammar)


@dataclass(frozen=True, slots=True)
class Score:
    """One measure's verdict: a value, whether it counts as passed (None: it does not decide that), and why.

    `error`: the measure failed by itself, so there is no verdict; a rollout without one that counts is not trained.
    `counts` is False for a check metric (weight 0): it is on record, and changes neither reward nor `passed`.
    `roles` are the values of several agents of one attempt, where the measure tells them apart.
    `turns` are values of single turns, where the measure gives one for each turn of the model; `value` is their sum.
    """

    value: float
    passed: bool | None
    reason: str = ""
    error: bool = False
    counts: bool = True
    roles: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if type(self.reason) is not str or not self.reason.isascii() or len(self.reason) > MAX_REASON_CHARS:
            _set(self, "reason", shorten(as_text(self.reason), MAX_REASON_CHARS))

    @property
    def decides(self) -> bool:
        return self.counts and self.passed is not None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to solve: its id, what the user says, what is expected, and the whole row."""

    id: str
    input: str | tuple[Message, ...]
    expect: Any = None
    row: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None  # why it could not be made, so that its attempts fail

    def __post_init__(self) -> None:
        _make_encodable(self, "id", "input", "expect", "row", "error")

    @property
    def own_id(self) -> str:
        """Its id in its own suite, by which evaluations are seeded."""
        return self.id.removeprefix(HELD_OUT_PREFIX)


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """Another conversation of an attempt: with a subagent, or after the agent has changed its history.

    It is trained as a row of its own, with the attempt's advantage. What was sampled in another conversation is
    context here: a turn is trained once.
    """

    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    role: str = ""  # of the agent, where an attempt has several
    advantages: Array | None = None  # [T] float32, as those of a rollout


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One attempt at one problem, whole. `turns[0]` is the prompt."""

    problem_id: str
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    tool_results: tuple[ToolResult, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)
    reward: float = 0.0
    seconds: float = 0.0
    tool_seconds: float = 0.0
    error: str | None = None
    advantages: Array | None = None  # [T] float32, where its tokens have different ones, or its source gave them
    tool_names: tuple[str, ...] = ()  # the tools that it could call
    lineages: tuple[Lineage, ...] = ()  # its other conversations, where an agent has several
    info: Mapping[str, Any] = field(default_factory=dict)  # more for the records: an agent's exit status and logs
    role: str = ""  # of the agent whose conversation this is, where an attempt has several
    states: tuple[str, ...] = ()  # the state in which each turn of the model began, where the environment names them

    def __post_init__(self) -> None:
        _make_encodable(self, "problem_id", "error", "tool_names", "info", "states")
        if not all(map(str.isascii, self.scores)):
            _set(self, "scores", {encodable(name): score for name, score in self.scores.items()})

    def __repr__(self) -> str:  # short: asyncio.Runner makes one of whatever its task returns
        size = f"{len(self.turns)} turns, {self.sampled_tokens} sampled tokens"
        return f"Rollout({self.problem_id!r}, {size}, stop={self.stop!r}, reward={self.reward:g})"

    @property
    def verdict(self) -> bool | None:
        """Whether every measure that counts passed; None if no measure decides that."""
        verdict = None
        for score in self.scores.values():
            if score.decides:
                verdict = bool(score.passed) and verdict is not False
        return verdict

    @property
    def passed(self) -> bool:
        """Every measure that counts passed."""
        return self.verdict is True

    @property
    def cut_off(self) -> bool:
        """Whether it ended in the middle: `truncated` by max_new_tokens, or by a context that was full."""
        return self.stop in CUT_OFF

    @property
    def sampled_tokens(self) -> int:
        count = 0
        for turn in self.all_turns:
            if turn.maker == "model":
                count += len(turn.token_ids)
        return count

    @property
    def model_turns(self) -> tuple[Turn, ...]:
        """The turns of the model, in the order in which its conversations ended: its own is the last."""
        conversations = (*(lineage.turns for lineage in self.lineages), self.turns)
        return tuple(turn for turns in conversations for turn in turns if turn.maker == "model")

    @property
    def conversations(self) -> tuple[Rollout | Lineage, ...]:
        """Itself and its other conversations, each of which is trained as a row."""
        return (self, *self.lineages)

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        turns = self.turns
        for lineage in self.lineages:
            turns += lineage.turns
        return turns


def without_routing(rollout: Rollout) -> Rollout:
    """The rollout without recorded experts, which take more memory than all else."""
    if all(turn.routing is None for turn in rollout.all_turns):
        return rollout

    def stripped(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        return tuple(replace(turn, routing=None) for turn in turns)

    lineages = tuple(replace(lineage, turns=stripped(lineage.turns)) for lineage in rollout.lineages)
    return replace(rollout, turns=stripped(rollout.turns), lineages=lineages)


def oldest_version(rollouts: Iterable[Rollout]) -> int | None:
    """Of the policies that sampled them; None where none did."""
    versions: list[Array] = []
    for rollout in rollouts:
        versions += map(_VERSIONS, rollout.all_turns)  # those of other makers are empty
    return int(np.concatenate(versions).min()) if any(map(len, versions)) else None


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling rollouts of one problem: they share a prompt and are scored against each other."""

    problem_id: str
    rollouts: tuple[Rollout, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)  # what reward functions logged, by name

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts]


@dataclass(frozen=True, slots=True, eq=False)
class Sample(_EqualByArrays):
    """One row for the learner: flat tokens, who made them, and what they are worth, as arrays of one length.

    `policy_mask` marks the model's tokens that count in the policy loss, `echo_mask` the bodies of tool results
    (for ECHO). `logprobs` are the sampler's: 0 where the model did not make the token, NaN where it did and they
    are not known. The first `prompt_length` tokens are the same for every sample of one `group`, so they need
    computing once. One number is accepted for `advantages` and `versions`.
    """

    token_ids: Array  # [T] int32
    policy_mask: Array  # [T] bool
    echo_mask: Array  # [T] bool
    logprobs: Array  # [T] float32
    advantages: Array  # [T] float32
    group: int = 0
    prompt_length: int = 0
    versions: Array = 0  # type: ignore[assignment]  # [T] int32

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        kinds = {"token_ids": np.int32, "policy_mask": np.bool_, "echo_mask": np.bool_, "logprobs": np.float32}
        for name, kind in (kinds | {"advantages": np.float32, "versions": np.int32}).items():
            _set_array(self, name, kind, count)
        lengths = {f.name: len(x) for f in fields(self) if isinstance(x := getattr(self, f.name), np.ndarray)}
        if set(lengths.values()) != {count}:
            raise ValueError(f"the arrays of a sample of {count} tokens have other lengths: {lengths}")


_LOG_CHARS = 4000


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """One run of an agent's program. `stopped` says which limit ended it, if one did; `result` is what it wrote to its
    result file (JSON, or text), what a function returned, or what was posted with the reward."""

    exit_code: int = 0  # negative: the signal that ended it
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    stopped: Literal["time", "output"] | None = None
    result: Any = None
    reward: float | None = None  # where an external agent has posted one
    error: str | None = None  # posted by an external agent; the attempt counts as failed

    def failure(self, timeout_s: float, max_output_bytes: int) -> str | None:
        """Why the attempt counts as failed; None where the program ended by itself, with whatever exit status."""
        if self.error is not None:
            return f"the agent posted an error: {self.error[:_LOG_CHARS]}"
        if self.stopped == "time":
            return f"the agent took longer than {timeout_s:g} s (agent.timeout_s) and was ended{self._last_line()}"
        if self.stopped == "output":
            return f"the agent wrote more than {max_output_bytes} bytes (agent.max_output_bytes) and was ended"
        if self.exit_code < 0:
            return f"the agent was ended by signal {-self.exit_code}{self._last_line()}"
        return None

    def _last_line(self) -> str:
        lines = (self.stderr or self.stdout).strip().splitlines()
        return f"; its last line was: {lines[-1][:300]}" if lines else ""

    def explain_silence(self) -> str:
        """The error of an attempt in which the model was never asked."""
        return f"the agent ended with status {self.exit_code} without asking the model{self._last_line()}"

    def record(self) -> dict[str, Any]:
        """For the run's records: the ends of long texts."""
        fields = {"exit_code": self.exit_code, "stdout": self.stdout[-_LOG_CHARS:], "stderr": self.stderr[-_LOG_CHARS:]}
        return fields | ({"stopped": self.stopped} if self.stopped else {})
