"""The trajectory protocol: its request bodies, groups as columns, and an HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from palestra.core.config import RunConfig
from palestra.core.errors import InputError, ServiceError
from palestra.core.http import HttpError, Request, Retries, ask_async
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Maker, StopReason
from palestra.extras.atropos.columns import group_from_dict, group_to_dict

MAX_BATCH_SIZE = 65_536
MAX_VALUE = 1e18  # of scores, advantages and logprobs: their squares still fit float32

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Value = Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)]
Name = Annotated[str, Field(max_length=4096)]
T = TypeVar("T")
Row = Annotated[list[T], Field(fail_fast=True)]  # one entry for each token: the first wrong one is enough
# how many entries a column has: one for each sequence, or for each token of each sequence
PerSequence = Annotated[list[T] | None, "per sequence"]
PerToken = Annotated[Row[Row[T]] | None, "per token"]
_EMPTY_IS_ABSENT = BeforeValidator(lambda value: None if value in ([], {}) else value)


class Body(BaseModel):
    """Unknown fields are ignored, as the protocol's clients expect; NaN and infinity are refused."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Registration(Body):
    """A trainer and its settings."""

    wandb_group: Name = ""
    wandb_project: Name = ""
    batch_size: int = Field(ge=1, le=MAX_BATCH_SIZE)
    max_token_len: Int32
    checkpoint_dir: Name = ""
    save_checkpoint_interval: Int32 = -1
    starting_step: int = Field(0, ge=0, lt=2**31)
    num_steps: Int32


class EnvRegistration(Body):
    """An environment that will send groups."""

    max_token_length: int = Field(ge=1, lt=2**31)
    desired_name: str | None = Field(None, max_length=256)
    weight: float | None = Field(1.0, ge=0, le=1e6)
    group_size: int = Field(ge=1, le=MAX_BATCH_SIZE)
    min_batch_allocation: float | None = Field(None, ge=0, le=1)


class EnvIdentifier(Body):
    env_id: Int32


class Verdict(Body):
    """One measure's score of one rollout."""

    value: Value
    passed: bool | None
    reason: str = ""
    error: bool = False
    counts: bool = True


class ToolCallResult(Body):
    """That a tool was called, and how it went; the text is among the messages."""

    id: str
    name: str
    ok: bool
    seconds: Value = 0.0
    raised: bool = False
    error: str | None = None  # why the text of the call could not be parsed
    format: str = ""  # in which the call was written, if it is not the model's own


class LineageTurn(Body):
    """One turn of another conversation of an attempt; logprobs and versions of the model's tokens only."""

    maker: Maker
    token_ids: Row[TokenId]
    logprobs: Row[Value | None] = Field(default_factory=list)
    versions: Row[Int32] = Field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> LineageTurn:
        count = len(self.token_ids) if self.maker == "model" else 0
        if not len(self.logprobs) == len(self.versions) == count:
            raise ValueError(f"{len(self.logprobs)} logprobs and {len(self.versions)} versions; expected {count}")
        return self


class LineageBody(Body):
    """Another conversation of an attempt, such as that of a subagent."""

    turns: list[LineageTurn]
    messages: list[dict[str, Any]]
    stop: StopReason


class ScoredGroup(Body):
    """The scored sequences of one problem. Masks are -100 where a token is not trained."""

    tokens: Row[Row[TokenId]] = Field(min_length=1, max_length=MAX_BATCH_SIZE)
    masks: Annotated[Row[Row[Int32]], "per token"]
    scores: Annotated[Row[Value], "per sequence"]
    advantages: Annotated[PerToken[Value], _EMPTY_IS_ABSENT] = None
    ref_logprobs: Annotated[PerToken[Value], _EMPTY_IS_ABSENT] = None
    messages: Annotated[PerSequence[list[dict[str, Any]]], _EMPTY_IS_ABSENT] = None
    generation_params: Annotated[dict[str, Any] | None, _EMPTY_IS_ABSENT] = None
    inference_logprobs: Annotated[PerToken[Value], _EMPTY_IS_ABSENT] = None
    overrides: Annotated[PerSequence[dict[str, Any]], _EMPTY_IS_ABSENT] = None
    group_overrides: Annotated[dict[str, Any] | None, _EMPTY_IS_ABSENT] = None
    images: Annotated[Any, _EMPTY_IS_ABSENT] = None
    env_id: Int32 | None = None
    # what Palestra's own environments add, so that a trainer knows as much as of rollouts in its own process
    turns: PerSequence[list[tuple[Maker, Annotated[int, Field(ge=0)]]]] = None
    versions: PerToken[Int32] = None
    stops: PerSequence[StopReason] = None
    errors: PerSequence[str | None] = None
    verdicts: PerSequence[dict[str, Verdict]] = None
    tool_names: PerSequence[list[str]] = None
    tool_results: PerSequence[list[ToolCallResult]] = None
    seconds: PerSequence[Value] = None
    tool_seconds: PerSequence[Value] = None
    lineages: PerSequence[list[LineageBody]] = None
    info: PerSequence[dict[str, Any]] = None
    states: PerSequence[list[str]] = None
    metrics: dict[str, Value] | None = None
    distill_token_ids: Annotated[PerToken[Row[Int32]], _EMPTY_IS_ABSENT] = None
    distill_logprobs: Annotated[PerToken[Row[Value]], _EMPTY_IS_ABSENT] = None

    @field_validator("messages")
    @classmethod
    def _messages_have_roles(cls, value: list[list[dict[str, Any]]] | None) -> Any:
        for message in (m for conversation in value or () for m in conversation):
            if "role" not in message or "content" not in message:
                raise ValueError("every message needs 'role' and 'content'")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> ScoredGroup:
        lengths = [len(sequence) for sequence in self.tokens]
        if 0 in lengths:
            raise ValueError(f"tokens: sequence {lengths.index(0)} is empty")
        for name in (*_columns("per sequence"), *_columns("per token")):
            if (rows := getattr(self, name)) is not None and len(rows) != len(lengths):
                raise ValueError(f"{name} has {len(rows)} entries; expected {len(lengths)}, one for each sequence")
        for name in _columns("per token"):
            for i, row in enumerate(getattr(self, name) or ()):
                if len(row) != lengths[i]:
                    expected = f"expected one for each of its {lengths[i]} tokens"
                    raise ValueError(f"{name}: sequence {i} has {len(row)} entries; {expected}")
        for i, turns in enumerate(self.turns or ()):
            if (count := sum(tokens for _, tokens in turns)) != lengths[i]:
                raise ValueError(f"turns: sequence {i} has {lengths[i]} tokens, its turns {count} together")
        return self

    @property
    def longest(self) -> int:
        """Number of tokens in its longest conversation."""
        other = (sum(len(turn.token_ids) for turn in each.turns) for row in self.lineages or () for each in row)
        return max(*map(len, self.tokens), *other, 0)


@cache
def _columns(kind: str) -> list[str]:
    return [name for name, field in ScoredGroup.model_fields.items() if kind in field.metadata]


# columns that an environment may fill in, and that our trainer does not read
UNUSED = ("ref_logprobs", "distill_token_ids", "distill_logprobs", "images", "generation_params", "group_overrides")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    vocabulary: int
    context_tokens: int


def read_group(columns: Mapping[str, Any], name: str, limits: ModelLimits, policy_version: int) -> Group:
    """The group of columns that were posted; PalestraError where the model cannot take them."""
    for name, row in (("scores", columns["scores"]), *(("advantages", row) for row in columns.get("advantages") or ())):
        if (wrong := next((value for value in row if not abs(value) <= MAX_VALUE), None)) is not None:  # also for NaN
            raise InputError(f"{name} has {wrong}; expected numbers up to {MAX_VALUE:g}, as float32 can compute with")
    group = group_from_dict(columns, name, version=policy_version)
    for rollout in group.rollouts:
        for conversation in rollout.conversations:
            tokens = [token for turn in conversation.turns for token in turn.token_ids.tolist()]
            if len(tokens) > limits.context_tokens:
                raise InputError(f"a sequence has {len(tokens)} tokens; the model holds {limits.context_tokens}")
            if (largest := max(tokens, default=0)) >= limits.vocabulary:
                raise InputError(f"token id {largest} is outside of the vocabulary of {limits.vocabulary}")
    return group


def write_group(group: Group, env_id: int, mask_truncated: bool) -> dict[str, Any]:
    """The group as it is posted.

    A failed attempt trains nothing, but groups must keep their size: for trainers that do not read `errors`, its
    score is the mean of the others, which leaves their baseline as it is.
    """
    rewards = [r.reward for r in group.rollouts if r.error is None]
    mean = sum(rewards) / len(rewards)
    columns = group_to_dict(group, mask_truncated=mask_truncated)
    columns["scores"] = [mean if r.error is not None else r.reward for r in group.rollouts]
    return columns | {"env_id": env_id}


_GIVE_UP_S = 600.0
_SLOW_S = 30.0  # after which a request without an answer is logged
_MAX_BATCH_BYTES = 4 * 2**30
_NOT_THIS_API = (200, 404, 405, 501)  # a page instead of JSON, or nothing at that path


class ApiUnreachable(ServiceError):
    """The trajectory API could not be reached for as long as the client waits."""


@dataclass(frozen=True, slots=True)
class WireClient:
    """HTTP to a trajectory API. Requests are repeated while it is away or has no room."""

    url: str
    token: str | None = None
    give_up_s: float = _GIVE_UP_S
    gone_s: float | None = None  # how long to repeat while it cannot be reached at all; None: give_up_s
    note: Callable[[str], None] = lambda text: None

    async def register(self, config: RunConfig, starting_step: int, context_tokens: int, folder: RunFolder) -> None:
        body = {
            "wandb_group": config.track.run_name or folder.path.name,
            "wandb_project": config.track.project,
            "batch_size": config.train.problems_per_step * config.rollout.group_size,
            "max_token_len": context_tokens,
            "checkpoint_dir": str(folder.env_checkpoints.resolve()),  # identifies the run when it is resumed
            "save_checkpoint_interval": config.checkpoint.every,
            "starting_step": starting_step,
            "num_steps": config.train.max_steps,
        }
        try:
            await self.call("/register", body)
        except HttpError as error:
            if error.status in _NOT_THIS_API:
                raise ServiceError(f"{error}. This is no trajectory API; `palestra trajectory` starts one") from None
            raise

    async def batch(
        self, after: int, saved: int | None = None, step: int | None = None
    ) -> tuple[int, list[dict[str, Any]]] | str:
        """The number and the groups of the batch that follows `after`; if there is none, the reason if one is known.

        The API keeps the batches that follow `saved` (default: `after`), so that a killed trainer gets them again.
        `step` is the trainer's, which environments end by.
        """
        asked = {"after": after, "saved": saved, "step": step}
        path = "/batch?" + "&".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        try:
            answer = await self.call(path, method="POST")
        except HttpError as error:
            if error.status != 405:
                raise
            answer = await self.call(path)  # Atropos's own server knows GET alone
        if answer.get("status") == "error":
            raise ServiceError(f"{self.url}/batch: {answer.get('message')}. Was it reset during the run?")
        groups = answer.get("batch")
        return (int(answer.get("number", after + 1)), groups) if groups else answer.get("message") or ""

    async def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, key: str | None = None
    ) -> dict[str, Any]:
        """The response; a post with a `key` counts once, however often it is repeated."""
        gone_s = self.give_up_s if self.gone_s is None else self.gone_s
        headers = {"Idempotency-Key": key} if key else {}
        url = f"{self.url.rstrip('/')}{path}"
        request = Request(url, body, method or "", self.token, headers, max_bytes=_MAX_BATCH_BYTES)
        asking = asyncio.ensure_future(ask_async(request, Retries(busy_s=self.give_up_s, unreachable_s=gone_s)))
        try:
            done, _ = await asyncio.wait({asking}, timeout=_SLOW_S)
            if not done:
                self.note(
                    f"{request.url} has given no answer for {_SLOW_S:.0f} s; it is asked again for {gone_s:.0f} s. "
                    "`palestra trajectory` starts such a server"
                )
            return dict(await asking)
        except HttpError as error:
            if error.status is None:
                raise ApiUnreachable(f"{error}. Start it with: palestra trajectory") from None
            raise
        finally:
            asking.cancel()
