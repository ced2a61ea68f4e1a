"""The bodies of the trajectory API, checked where they come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from palestra.core.types import Maker, StopReason

MAX_BATCH_SIZE = 65_536
MAX_VALUE = 1e18  # of scores, advantages and logprobs: their squares still fit float32

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Value = Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)]
Name = Annotated[str, Field(max_length=4096)]
T = TypeVar("T")
Row = Annotated[list[T], Field(fail_fast=True)]  # one entry for each token: the first wrong one is enough


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
    passed: bool
    reason: str = ""
    error: bool = False


class ToolCallResult(Body):
    """That a tool was called, and how it went; the text is among the messages."""

    id: str
    name: str
    ok: bool
    seconds: Value = 0.0
    raised: bool = False
    error: str | None = None  # why the text of the call could not be parsed
    format: str = ""  # in which the call was written, if it is not the model's own


class ScoredGroup(Body):
    """The scored sequences of one problem. Masks are -100 where a token is not trained."""

    tokens: Row[Row[TokenId]] = Field(min_length=1, max_length=MAX_BATCH_SIZE)
    masks: Row[Row[Int32]]
    scores: Row[Value]
    advantages: Row[Row[Value]] | None = None
    ref_logprobs: Row[Row[Value]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: Row[Row[Value]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Int32 | None = None
    # what Palestra's own environments add, so that a trainer knows as much as of rollouts in its own process
    turns: list[list[tuple[Maker, Annotated[int, Field(ge=0)]]]] | None = None
    versions: Row[Row[Int32]] | None = None
    stops: list[StopReason] | None = None
    errors: list[str | None] | None = None
    verdicts: list[dict[str, Verdict]] | None = None
    tool_names: list[list[str]] | None = None
    tool_results: list[list[ToolCallResult]] | None = None
    seconds: list[Value] | None = None
    tool_seconds: list[Value] | None = None
    distill_token_ids: Row[Row[Row[Int32]]] | None = None
    distill_logprobs: Row[Row[Row[Value]]] | None = None

    @field_validator(
        "advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "distill_token_ids",
        "distill_logprobs", "generation_params", "group_overrides", "images", mode="before",
    )  # fmt: skip
    @classmethod
    def _empty_is_absent(cls, value: Any) -> Any:
        return None if value in ([], {}) else value

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
        for name in (*_PER_SEQUENCE, *_PER_TOKEN):
            _agree(name, len(lengths), getattr(self, name))
        for name in _PER_TOKEN:
            for i, row in enumerate(getattr(self, name) or ()):
                if len(row) != lengths[i]:
                    expected = f"expected one for each of its {lengths[i]} tokens"
                    raise ValueError(f"{name}: sequence {i} has {len(row)} entries; {expected}")
        for i, turns in enumerate(self.turns or ()):
            if (count := sum(tokens for _, tokens in turns)) != lengths[i]:
                raise ValueError(f"turns: sequence {i} has {lengths[i]} tokens, its turns {count} together")
        return self


_PER_SEQUENCE = (
    "scores", "overrides", "messages", "turns", "stops", "errors", "verdicts", "tool_names", "tool_results",
    "seconds", "tool_seconds",
)  # fmt: skip
_PER_TOKEN = (
    "masks", "advantages", "ref_logprobs", "inference_logprobs", "versions", "distill_token_ids", "distill_logprobs",
)  # fmt: skip


def _agree(name: str, sequences: int, rows: Sequence[Any] | None) -> None:
    if rows is not None and len(rows) != sequences:
        raise ValueError(f"{name} has {len(rows)} entries; expected one for each of the {sequences} sequences")
