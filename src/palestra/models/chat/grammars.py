"""Grammars that a sampler follows, compiled from text: calls in free text, or a turn of calls or of a JSON answer.

The text is JSON, so that it can be sent to a policy in another process: a list of tool schemas for calls in free text,
or an object for the other kinds (`GrammarText`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from palestra.core.errors import MissingPackageError, UnsupportedError, UserCodeError
from palestra.core.types import Grammar, Matching
from palestra.models.chat.callformats import CallFormat, format_of
from palestra.models.chat.callrules import json_rule, rules_of, trigger_of
from palestra.models.chat.toolcalls import is_inside

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NOTHING_YET = (b"", b"<|python_tag|>")  # before a call that must begin its message
_KEPT_PLACES = 4096  # a mask each, of a bit for every token
_KEPT = 256  # grammars; environments may make up tools for every problem
# formats with all calls in one block, or with one call in a message
_ONE_BLOCK = ("granite", "phi4", "nemotron_v2", "tool_calls", "mistral", "lfm", "llama", "harmony", "minimax", "kimi",
              "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4")  # fmt: skip
_SETTINGS = "rollout.constrain_tool_calls, answers by a JSON schema and required tool calls"
_A_NOTE = "Unknown format"  # a warning that can be ignored: a JSON schema's `format` may be only a note


@dataclass(slots=True)
class _Place:
    """A place in a call, by the tokens that lead there. Siblings say mostly the same, and a mask takes 20 to 100 us."""

    mask: bytes | None = None  # once it was asked for
    after: dict[int, _Place] = field(default_factory=dict)


class CallGrammar(Grammar):
    """What may be said when these tools are at hand. It never changes; each turn follows it with a `start()`."""

    def __init__(self, vocabulary: _Compiler, matcher: LLMatcher, after_call: bytes | None) -> None:
        self.vocabulary = vocabulary
        self.after_call = after_call
        self._matcher = matcher
        self._openings: dict[int, bytes | None] = {}
        self.places: dict[bytes, _Place] = {}  # by the part of a call that is there when it opens
        self._masks = 0

    def start(self) -> CallMatching:
        return CallMatching(self)

    def opened(self, said: bytes) -> LLMatcher:
        """A matcher for one call, of which `said` is there already."""
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(self.vocabulary.tokens.tokenize_bytes(said))
        return matcher

    def mask_at(self, place: _Place, matcher: LLMatcher) -> bytes:
        """What may follow; `matcher` is there."""
        if place.mask is None:
            if self._masks >= _KEPT_PLACES:  # calls in progress go on in the places that they have
                self.places, self._masks = {}, 0
            mask = matcher.compute_bitmask()
            if mask.count(0) == len(mask):
                raise UserCodeError(f"the tokenizer cannot write the call that was begun; {matcher.get_error()}")
            place.mask, self._masks = mask, self._masks + 1
        return place.mask

    def openings(self, begun: int) -> bytes | None:
        """Outside of calls, behind the first `begun` bytes of a tag: everything but a wrong opening of a call."""
        if begun not in self._openings:
            wrong = [i for i, said in self.vocabulary.crossing[begun] if self.opened(said).is_error()]
            mask = bytearray(b"\xff" * -(-len(self.vocabulary.pieces) // 8))
            for token_id in wrong:
                mask[token_id >> 3] &= ~(1 << (token_id & 7))
            self._openings[begun] = bytes(mask) if wrong else None
        return self._openings[begun]


class CallMatching(Matching):
    """Follows one turn. Text is free, and so is thinking at the start, where a call is text, not executed."""

    def __init__(self, grammar: CallGrammar) -> None:
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._text = bytearray()  # outside of calls
        self._begun = 0  # bytes of an opening tag at its end
        self._call: LLMatcher | None = None
        self._place = _Place()  # in the call
        self._has_called = False

    def allowed(self) -> bytes | None:
        if self._has_called and self._grammar.after_call is not None:
            return self._grammar.after_call
        if self._call is None:
            is_late = self._vocabulary.at_start and self._text.strip() not in _NOTHING_YET
            return None if is_late else self._grammar.openings(self._begun)
        return self._grammar.mask_at(self._place, self._call)

    def accept(self, token_id: int) -> None:
        if self._call is not None:
            if not self._call.consume_token(token_id):
                raise UserCodeError(f"a tool call left its grammar: {self._call.get_error()}")
            if self._call.is_accepting():
                self._call, self._has_called = None, True
            else:
                self._place = self._place.after.setdefault(token_id, _Place())
            return
        pieces, text, trigger = self._vocabulary.pieces, self._text, self._vocabulary.trigger
        unseen = max(0, len(text) - len(trigger) + 1)  # where a trigger that is new would begin
        text += pieces[token_id] if token_id < len(pieces) else b""
        at = text.find(trigger, unseen)
        if self._vocabulary.at_start and text[: max(at, 0)].strip() not in _NOTHING_YET:
            at = -1
        self._begun = next((n for n in range(len(trigger) - 1, 0, -1) if text.endswith(trigger[:n])), 0)
        if (at >= 0 or self._begun) and is_inside(text.decode(errors="replace")):
            self._begun = 0
        elif at >= 0:
            said = bytes(text[at + len(trigger) :])
            self._call, self._place = self._grammar.opened(said), self._grammar.places.setdefault(said, _Place())


def bits(token_ids: Sequence[int], vocabulary: int) -> bytes | None:
    """A mask that allows these tokens alone; None for none."""
    if not token_ids:
        return None
    mask = bytearray(-(-vocabulary // 8))
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


@dataclass(frozen=True, slots=True)
class TurnGrammar(Grammar):
    """Never changes; each turn follows it with a `start()`."""

    matcher: LLMatcher
    stop_token_ids: frozenset[int]
    stops: bytes  # the same as a mask

    def start(self) -> TurnMatching:
        return TurnMatching(self, self.matcher.deep_copy())


@dataclass(frozen=True, slots=True)
class TurnMatching(Matching):
    _grammar: TurnGrammar
    _matcher: LLMatcher

    def allowed(self) -> bytes | None:
        if self._matcher.is_stopped():
            return self._grammar.stops
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_accepting():
            mask = bytes(a | b for a, b in zip(mask, self._grammar.stops.ljust(len(mask), b"\0"), strict=False))
        if mask.count(0) == len(mask):
            raise UserCodeError(f"the tokenizer cannot write what was begun; {self._matcher.get_error()}")
        return mask

    def accept(self, token_id: int) -> None:
        if token_id in self._grammar.stop_token_ids or self._matcher.is_stopped():
            return
        if not self._matcher.consume_token(token_id):
            raise UserCodeError(f"a turn left its grammar: {self._matcher.get_error()}")


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
    compiler = cache(partial(_Compiler, tokenizer))
    return lru_cache(_KEPT)(lambda text: compiler().compile(text))


class _Compiler:
    """A tokenizer as llguidance knows it, the tokens that matter where a call opens, and the grammars of its format."""

    def __init__(self, tokenizer: Any) -> None:
        try:
            from llguidance import hf
        except ModuleNotFoundError:
            raise MissingPackageError(f"{_SETTINGS} need llguidance; pip install 'palestra[constrain]'") from None
        try:
            self.tokens: LLTokenizer = hf.from_tokenizer(tokenizer)
        except ValueError as error:
            raise UnsupportedError(
                f"{_SETTINGS} cannot use {type(tokenizer).__name__}: {error}. Leave them off"
            ) from None
        template = getattr(tokenizer, "chat_template", None)
        texts = [str(token.content) for token in tokenizer.added_tokens_decoder.values()]
        self._format: CallFormat = format_of(template, texts)
        self.trigger = trigger_of(self._format).encode()
        self.at_start = self.trigger == b"{"
        added = {str(token.content): int(i) for i, token in tokenizer.added_tokens_decoder.items()}
        self._apart = {text: i for text, i in added.items() if text and self.tokens.is_special_token(i)}
        longest_first = sorted(self._apart, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def literal(self, text: str) -> str:
        """The text in llguidance's dialect of Lark, which keeps special tokens, and added ones in <…>, apart."""
        parts = [part for part in self._cut.split(text) if part] if self._cut is not None else [text]
        rules = [
            f"<[{self._apart[part]}]>" if part in self._apart else json.dumps(part, ensure_ascii=False)
            for part in parts
        ]
        return " ".join(rules) or '""'

    @cached_property
    def pieces(self) -> list[bytes]:
        return [self.tokens.decode_bytes([i]) for i in range(self.tokens.vocab_size)]

    @cached_property
    def crossing(self) -> list[list[tuple[int, bytes]]]:
        """By the length of the trigger's written part: the tokens that complete it, and their bytes behind it."""
        by_length: list[list[tuple[int, bytes]]] = [[] for _ in self.trigger]
        for token_id, piece in enumerate(self.pieces):
            if self.trigger[-1:] in piece[:-1]:
                for begun, rows in enumerate(by_length):
                    before, tag, said = (self.trigger[:begun] + piece).partition(self.trigger)
                    if tag and said and not (self.at_start and before.strip()):
                        rows.append((token_id, said))
        return by_length

    def compile(self, text: str) -> Grammar:
        value = json.loads(text)
        if isinstance(value, list):
            return self._calls(value)
        turn = GrammarText(**value)
        if turn.free_text:
            return self._calls(turn.tools, turn.stop_token_ids)
        # one or more calls, or an answer by the schema; a stop token ends it
        written = rules_of(self._format, turn.tools, self.literal, turn.one_call)
        rules, starts = list(written.rules), []
        if turn.tools:
            more = "" if turn.one_call or self._format.name in _ONE_BLOCK else "(WS? call)*"
            rules += [f"calls: {written.lead} call {more}", f"call: {written.call}"]
            starts.append("calls")
        if turn.answer is not None:
            rules.append(f"answer: {written.answer_lead} {json_rule(turn.answer)}")
            starts.append("answer")
        start = " | ".join(starts)
        if turn.close_reasoning:
            closing = self.literal(turn.close_reasoning)
            ends_text = not closing.startswith("<[")
            rules.append(f"reasoning[suffix={closing}]: /(?s:.*)/" if ends_text else f"reasoning: /(?s:.*)/ {closing}")
            start = f"reasoning WS? ({start})"
        matcher, refusal = self._matcher(start, rules)
        if refusal:
            raise UnsupportedError(f"the model cannot be kept to the JSON schema: {refusal}; change the schema")
        stops = bits(turn.stop_token_ids, self.tokens.vocab_size)
        return TurnGrammar(matcher, frozenset(turn.stop_token_ids), stops or b"")

    def _calls(self, tools: Sequence[dict[str, Any]], end_after_call: Sequence[int] = ()) -> CallGrammar:
        """Calls in free text. After a call, only tokens of `end_after_call` may come, if there are any."""
        rules = rules_of(self._format, tools, self.literal)
        matcher, refusal = self._matcher(rules.body, rules.rules)
        if not refusal:
            return CallGrammar(self, matcher, bits(end_after_call, self.tokens.vocab_size))
        for tool in tools if len(tools) > 1 else ():
            self._calls([tool])  # raises for the one that is to blame
        raise UnsupportedError(
            f"rollout.constrain_tool_calls cannot keep to the schema of {tools[0]['function']['name']!r}: {refusal}. "
            "Leave the setting off, or write the schema without it"
        )

    def _matcher(self, start: str, rules: Sequence[str]) -> tuple[LLMatcher, str]:
        """A matcher of these rules, and llguidance's reason why it cannot keep to them; empty if it can."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokens, "\n".join([f"start: {start}", *rules]), log_level=0)
        said = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        refusal = next((text for text in said if not text.startswith(_A_NOTE)), "")
        return matcher, refusal.partition("\n")[0].rpartition("JSON schema: ")[2]
