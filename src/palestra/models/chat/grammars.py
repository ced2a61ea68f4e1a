"""The text of a grammar -> what a sampler follows, on the side that samples.

The text is JSON, so that it can travel to a policy in another process: a list of tools' schemas for calls in free text,
or an object for the other kinds (`GrammarText`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from palestra.core.types import Grammar
from palestra.models.chat.callformats import CallFormat, format_of
from palestra.models.chat.callgrammar import CallGrammars
from palestra.models.chat.turngrammar import TurnGrammars

_KEPT = 256  # grammars; environments may make up tools for every problem


@dataclass(frozen=True, slots=True)
class GrammarText:
    """Free text with at most one call, or a turn that is calls or an answer by a JSON schema and nothing else."""

    stop_token_ids: tuple[int, ...]
    tools: tuple[dict[str, Any], ...] = ()
    answer: dict[str, Any] | None = None  # a JSON schema
    one_call: bool = False
    close_reasoning: str = ""  # the tag that ends the reasoning which the prompt has opened
    free_text: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def grammar_compiler(tokenizer: Any) -> Callable[[str], Grammar]:
    """Text -> grammar; llguidance is loaded at the first, and the last grammars are kept."""
    return _Compiler(tokenizer).compile


class _Compiler:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._made: dict[str, Grammar] = {}

    def compile(self, text: str) -> Grammar:
        if text not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            self._made[text] = self._compile(json.loads(text))
        return self._made[text]

    def _compile(self, value: Any) -> Grammar:
        if isinstance(value, list):
            return self._calls.of(value)
        read = GrammarText(**value)
        if read.free_text:
            return self._calls.of(read.tools, end_after_call=read.stop_token_ids)
        return self._turns.of(read.tools, read.answer, read.stop_token_ids, read.one_call, read.close_reasoning)

    @cached_property
    def _format(self) -> CallFormat:
        tokens = [str(token.content) for token in self._tokenizer.added_tokens_decoder.values()]
        return format_of(getattr(self._tokenizer, "chat_template", None), tokens)

    @cached_property
    def _calls(self) -> CallGrammars:
        return CallGrammars(self._tokenizer, self._format)

    @cached_property
    def _turns(self) -> TurnGrammars:
        return TurnGrammars(self._tokenizer, self._format)
