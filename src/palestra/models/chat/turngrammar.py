"""A grammar for a whole turn: nothing but tool calls, an answer that fits a JSON schema, or either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palestra.core.errors import PalestraError
from palestra.models.chat.callformats import CallFormat
from palestra.models.chat.callgrammar import A_NOTE, Literals, bits, guidance_tokens, why_not
from palestra.models.chat.callrules import json_rule, rules_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

# formats with all calls in one block, or with one call in a message
_ONE_BLOCK = ("granite", "phi4", "nemotron_v2", "tool_calls", "mistral", "lfm", "llama", "harmony", "minimax", "kimi",
              "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4")  # fmt: skip
_SETTING = "an answer by a JSON schema, or a required tool call,"


class TurnGrammars:
    """Makes such grammars for one tokenizer."""

    def __init__(self, tokenizer: Any, format: CallFormat) -> None:
        self._format = format
        self._tokens = guidance_tokens(tokenizer, _SETTING)
        self._literal = Literals(tokenizer, self._tokens)

    def of(
        self,
        tools: Sequence[dict[str, Any]],
        answer: dict[str, Any] | None,
        stop_token_ids: Sequence[int],
        one_call: bool = False,
        close_reasoning: str = "",
    ) -> TurnGrammar:
        """Calls of `tools`, one or more, or an answer by the schema; a stop token ends it.

        `close_reasoning` is the tag that ends the reasoning which the prompt has opened.
        """
        from llguidance import LLMatcher

        written = rules_of(self._format, tools, self._literal, one_call)
        rules = list(written.rules)
        if tools:
            more = "" if one_call or self._format.name in _ONE_BLOCK else "(WS? call)*"
            rules += [f"calls: {written.lead} call {more}", f"call: {written.call}"]
        if answer is not None:
            rules.append(f"answer: {written.answer_lead} {json_rule(answer)}")
        start = " | ".join([*(["calls"] if tools else []), *(["answer"] if answer is not None else [])])
        if close_reasoning:
            closing = self._literal(close_reasoning)
            ends_text = not closing.startswith("<[")
            rules.append(f"reasoning[suffix={closing}]: /(?s:.*)/" if ends_text else f"reasoning: /(?s:.*)/ {closing}")
            start = f"reasoning WS? ({start})"
        matcher = LLMatcher(self._tokens, "\n".join([f"start: {start}", *rules]), log_level=0)
        said = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if unkept := [text for text in said if not text.startswith(A_NOTE)]:
            raise PalestraError(f"the model cannot be kept to the JSON schema: {why_not(unkept[0])}; change the schema")
        stops = bits(stop_token_ids, self._tokens.vocab_size)
        return TurnGrammar(matcher, frozenset(stop_token_ids), stops or b"")


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """Never changes; each turn follows it with a `start()`."""

    matcher: LLMatcher
    stop_token_ids: frozenset[int]
    stops: bytes  # the same as a mask

    def start(self) -> TurnMatching:
        return TurnMatching(self, self.matcher.deep_copy())


class TurnMatching:
    """Follows one turn."""

    def __init__(self, grammar: TurnGrammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher

    def allowed(self) -> bytes | None:
        if self._matcher.is_stopped():
            return self._grammar.stops
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_accepting():
            mask = bytes(a | b for a, b in zip(mask, self._grammar.stops.ljust(len(mask), b"\0"), strict=False))
        if mask.count(0) == len(mask):
            raise PalestraError(f"the tokenizer cannot write what was begun; {self._matcher.get_error()}")
        return mask

    def accept(self, token_id: int) -> None:
        if token_id in self._grammar.stop_token_ids or self._matcher.is_stopped():
            return
        if not self._matcher.consume_token(token_id):
            raise PalestraError(f"a turn left its grammar: {self._matcher.get_error()}")
