"""What every dialect asks for and gets back: the form between HTTP and the conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.core.types import Message, SamplingParams
from palestra.models.chat.streaming import Delta
from palestra.servers.gateway.lineages import Node
from palestra.servers.openai.completer import Completion
from palestra.servers.openai.sampling_fields import SamplingFields


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The next assistant message, `fields.n` times. Without `reads_calls`, what looks like a tool call stays text."""

    messages: tuple[Message, ...]
    fields: SamplingFields
    tools: tuple[dict[str, Any], ...] = ()  # in OpenAI's form, as chat templates take them
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    reads_calls: bool = True
    grammar: str | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant message with its tokens."""

    node: Node
    message: Message  # its calls have the ids that the client knows
    thinking: str
    completion: Completion
    prompt_tokens: int
    cached_tokens: int

    @property
    def is_cut_off(self) -> bool:
        return self.completion.finish != "stop"

    @property
    def stop_text(self) -> str | None:
        """The stop sequence that ended it, if one did."""
        return self.completion.matched if isinstance(self.completion.matched, str) else None


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The tokens before an answer, and how many of them were known to the session."""

    tokens: int
    cached: int


Piece = tuple[int, "PromptSize | Delta | Answer | None"]  # of a stream: the choice, and what comes


def params_of(request: ChatRequest, run: SamplingParams, by_client: bool, limit: int, seed: int) -> SamplingParams:
    """How to sample one turn: by the run's settings or, `by_client`, by what the request says.

    What a training samples is the run's affair: an agent with temperature=0 would explore nothing. The client's stop
    sequences and limits always count.
    """
    fields = request.fields
    asked = fields.params(run.stop_token_ids, limit, limit)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    changed: dict[str, Any] = {n: getattr(asked, n) for n in names if by_client and getattr(fields, n) is not None}
    if by_client and fields.seed is not None:
        seed = asked.seed
    return replace(
        run,
        max_new_tokens=asked.max_new_tokens,
        stop=(*run.stop, *asked.stop, *request.stop),
        stop_token_ids=asked.stop_token_ids,
        grammar=request.grammar or run.grammar,
        seed=seed,
        **changed,
    )
