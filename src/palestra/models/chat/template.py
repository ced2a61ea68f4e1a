"""Messages -> tokens through a tokenizer's own chat template, append-only: the past is never rendered again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np

from palestra.core.errors import InputError, PalestraError, UnsupportedError
from palestra.core.messages import to_dict
from palestra.core.types import Message, ToolCall, Turn
from palestra.models.chat.callformats import HARMONY, JSON, CallFormat, format_of, parse_assistant
from palestra.models.chat.calls_tagged import find_harmony
from palestra.models.chat.encode import (
    PROBE,
    ForgedTexts,
    Piece,
    PieceTokenizer,
    ReplyTemplate,
    SegmentTokenizer,
    TemplateRefusal,
    cached,
    cut_into_pieces,
    mark,
    not_append_only,
    render,
    split_at_marks,
    with_texts,
)
from palestra.models.chat.streaming import StreamedReply
from palestra.models.chat.toolcalls import (
    Reply,
    UnexpectedCalls,
    closing_tag,
    parse_by_template,
    split_reasoning,
    strip_reasoning,
)

_CALL_ID = re.compile(r"tool_call_id|\.id\b|\[['\"]id['\"]\]")  # in the source of a template
# GLM, Gemma 4 and FunctionGemma end a call with the token that begins its result.
_BEGINS_RESULT = ("<|observation|>", "<|tool_response>", "<start_function_response>")
_HARMONY_END = "<|end|>"  # gpt-oss ends a finished conversation with <|return|>, earlier messages with this
_ENDS = (
    "<|im_end|> <|eot_id|> <|eom_id|> <end_of_turn> <|end|> <|call|> <|return|> <|eot|> <|eom|> <|endoftext|> "
    "<|end_of_text|>"
)
_END_OF_TURN = (*_ENDS.split(), *_BEGINS_RESULT)
MAX_CACHED_CHARS = 4096
PLAIN = re.compile(r"(?!\s)[\w .,:;+*/=()%!?#@~^'-]+(?<!\s)", re.ASCII)  # the same in every form of a body
_NOT_SHORT = re.compile(r"[^A-Za-z0-9]")  # Mistral's templates take ids of nine letters and digits alone
PROMPT_END_TOKENS = 8  # tokens that show whether the prompt opened the reasoning
_TEXT, _CALLS, _SHAPE = attrgetter("text"), attrgetter("tool_calls"), attrgetter("role", "name", "tool_call_id")
_ID_AND_NAME = attrgetter("id", "name")  # of a call
_SYSTEM, _QUESTION, _ANSWER, _LAST = "PALESTRASYSTEM", "PALESTRAQUESTION", "PALESTRAANSWER", "PALESTRALAST"


class ChatFormat:
    """How one tokenizer writes and reads conversations."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the tokenizer has no chat template, so messages cannot become tokens. "
                "Its special tokens belong to no known family either (ChatML, Llama 3, Mistral, Gemma, Phi-3). "
                "Use an instruction-tuned model, or set tokenizer.chat_template to a Jinja template."
            )
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which cannot tell which characters a token covers. "
                "Load the fast one: AutoTokenizer.from_pretrained(name, use_fast=True)."
            )
        self.tokenizer = tokenizer
        self._template = str(tokenizer.chat_template)
        taken = inspect.signature(tokenizer.apply_chat_template).parameters
        self._variables = set(re.findall(r"\w+", self._template)) - {"messages", *taken}
        self.shows_call_ids = _CALL_ID.search(self._template) is not None
        added = tokenizer.added_tokens_decoder
        self._special = {str(token.content): int(i) for i, token in added.items() if token.special}
        self._scaffolds: dict[Any, tuple[str, tuple[str, ...]]] = {}
        self._openings: dict[Any, str] = {}
        self._continuations: dict[Any, tuple[Turn, ...]] = {}
        self._reply_templates: dict[Any, ReplyTemplate] = {}
        self._prompt_ends: dict[tuple[int, ...], str] = {}
        self._segments = SegmentTokenizer(tokenizer)
        self.pieces = PieceTokenizer(self._segments, self._special)
        self._shows_tools = False  # not known yet
        self.call_format: CallFormat = format_of(tokenizer.chat_template, [str(t.content) for t in added.values()])
        # transformers' own parser, for a format that is not known here
        ships = getattr(tokenizer, "response_template", None) is not None
        self._ships_parser = ships and self.call_format is JSON and "set call_form" not in self._template
        self._probe_tools: tuple[dict[str, Any], ...] = ()  # to examine a template that refuses to do without tools
        try:
            self.render([Message("user", _QUESTION), Message("assistant", _ANSWER)])
        except TemplateRefusal:
            self._probe_tools = (PROBE,)
        self._begins_next: frozenset[int] = frozenset()  # of the stop tokens, those that begin the next message
        self.stop_token_ids: tuple[int, ...] = self._find_stop_token_ids()
        self.stop_texts: list[str] = tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Turn:
        """The opening of a conversation, up to where the assistant begins to speak.

        `variables` are the template's own (Qwen's enable_thinking); one that it does not have is refused.
        """
        self._check_variables(variables or {})
        options: dict[str, Any] = {"add_generation_prompt": True, **(variables or {})}
        text = self.render(messages, tools, **options)
        if tools and not self._shows_tools:
            try:
                self._shows_tools = text != self.render(messages, **options)
            except TemplateRefusal:  # it needs tools
                self._shows_tools = True
            if not self._shows_tools:
                raise UnsupportedError(
                    "the chat template does not show tools to the model. Use a model whose template does "
                    "(Qwen2.5, Qwen3, Llama 3.1, …), or set tokenizer.chat_template."
                )
        forged = ForgedTexts(self.pieces.has_special)
        blank = [with_texts(message, forged.marked) for message in messages]
        pieces = forged.cut(text, self.render(blank, tools, **options)) if forged.texts else [Piece(text, False)]
        ids = [token_id for _, run in self.pieces.encode(pieces).runs for token_id in run]
        return Turn("template", np.array(ids, np.int32))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = False,
        *,
        last_reasoning: str = "",
        **variables: Any,
    ) -> str:
        """The conversation as the template writes it; `last_reasoning` is that of the last assistant message."""
        has_calls = any(message.tool_calls or message.tool_call_id for message in messages)
        plain = self._plain(messages, self._calls_as) if has_calls else [to_dict(message) for message in messages]
        if last_reasoning:  # templates have one of two names for it
            last = next(row for row in reversed(plain) if row["role"] == "assistant")
            last |= {"reasoning_content": last_reasoning, "thinking": last_reasoning}
        return render(self.tokenizer, plain, tools, add_generation_prompt, **variables)

    @cached_property
    def _calls_as(self) -> str:
        """The form in which the template accepts calls. If it omits calls: as text, in the model's format."""
        call = ToolCall("call_0", "palestra_probe", {"a": 1})
        dialogue = [Message("user", _QUESTION), Message("assistant", "", (call,)), Message("tool", "4", (), "call_0")]
        is_shown = False
        for calls_as in ("object", "text"):
            try:
                text = render(self.tokenizer, self._plain(dialogue, calls_as), (PROBE,))
            except TemplateRefusal:
                continue
            written = text.partition(_QUESTION)[2]
            is_shown = is_shown or call.name in written
            # a dict written by Python's str, or text written as a JSON string, is no object
            if call.name in written and "{'a'" not in written and '\\"a' not in written:
                return calls_as
        return "object" if is_shown else "content"

    def _plain(self, messages: Sequence[Message], calls_as: str) -> list[dict[str, Any]]:
        has_short_ids = self.call_format.name in ("mistral", "mistral_args")
        rows = []
        for message in messages:
            if calls_as == "content" and message.tool_calls:  # for a template that leaves calls out
                written = self.call_format.write([(call.name, call.arguments) for call in message.tool_calls])
                text = f"{message.text}\n{written}" if message.text else written
                message = replace(message, text=text, tool_calls=())
            row = to_dict(message, arguments_as_text=calls_as == "text")
            for call in row.get("tool_calls", ()):
                call.pop("format", None)  # some templates write all fields of a call
                if has_short_ids:
                    call["id"] = _NOT_SHORT.sub("", call["id"])[-9:].rjust(9, "0")
            if has_short_ids and "tool_call_id" in row:
                row["tool_call_id"] = _NOT_SHORT.sub("", row["tool_call_id"])[-9:].rjust(9, "0")
            rows.append(row)
        return rows

    def continuation(
        self,
        replies: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        after_stop_token: bool = True,
        last_token: int | None = None,
    ) -> tuple[Turn, ...]:
        """The tokens after a sampled assistant turn; with its stop token, too, where the turn ended without one.

        `last_token` is the one that ended the turn. Where the template ends a turn with the token that begins the next
        message, and the model sampled another one, that token is fed, too.

        The bodies of the replies are `environment` turns, everything around them `template` turns.
        """
        if not self._begins_next:
            last_token = None
        make = partial(self._continuation, replies, variables or {}, after_stop_token, last_token)
        unusual = variables or not after_stop_token or last_token is not None or any(map(_CALLS, replies))
        if unusual or sum(map(len, map(_TEXT, replies))) > MAX_CACHED_CHARS:
            return make()
        return cached(self._continuations, tuple(replies), make)  # siblings often get the same replies

    def _continuation(
        self,
        replies: Sequence[Message],
        variables: Mapping[str, Any],
        after_stop_token: bool,
        last_token: int | None = None,
    ) -> tuple[Turn, ...]:
        if variables:
            self._check_variables(variables)
        # the model makes up the names of its calls, and some templates write them into the scaffold
        replies = [replace(r, name=None) if r.name and self.pieces.has_special(r.name) else r for r in replies]
        key, write = tuple(map(_SHAPE, replies)), partial(self._scaffold, replies, variables)
        has_more = variables or any(map(_CALLS, replies))  # than the key tells
        stop, scaffold = write() if has_more else cached(self._scaffolds, key, write)
        if last_token is not None and self._special.get(stop) in self._begins_next - {last_token}:
            after_stop_token = False
        bodies = list(map(_TEXT, replies))
        is_plain = len(bodies) == 1 and PLAIN.fullmatch(bodies[0]) and not self.pieces.has_special(bodies[0])
        if is_plain and after_stop_token:
            make = partial(ReplyTemplate, self._segments, stop + scaffold[0], scaffold[1], without_first=bool(stop))
            if turns := cached(self._reply_templates, (stop, scaffold), make).turns(bodies[0]):
                return turns
        if all(PLAIN.fullmatch(body) for body in bodies):
            # most results are a number or a plain sentence: a template writes those as it wrote the marks
            pieces = [Piece(scaffold[0], False)]
            for body, behind in zip(bodies, scaffold[1:], strict=True):
                pieces += [Piece(body, True), Piece(behind, False)]
        else:
            pieces = cut_into_pieces(self._delta(replies, variables)[1], scaffold, bodies)
        # after the stop token, as it stands in the conversation: some tokens eat the whitespace behind them
        encoded = self.pieces.encode([Piece(stop, False), *pieces] if stop else pieces)
        if stop and after_stop_token:
            del encoded.runs[0][1][0]
        return encoded.turns()

    def read(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_end: Sequence[int] = (),
        unexpected: UnexpectedCalls = "execute",
    ) -> Message:
        """The assistant message of sampled ids: without stop token, its reasoning and tool calls apart.

        `tools` are the tools' schemas, `prompt_end` the last tokens before the message.
        """
        text, before = self._decode(token_ids, prompt_end)
        reply = self.parse(text, tools, before, unexpected)
        return Message("assistant", strip_reasoning(reply.text), tool_calls=reply.calls, reasoning=reply.reasoning)

    def read_text(self, token_ids: Sequence[int], prompt_end: Sequence[int] = ()) -> str:
        """Read the message of an assistant without tools: anything that looks like a call is text."""
        return strip_reasoning(self.parse_text(*self._decode(token_ids, prompt_end)).text)

    def _decode(self, token_ids: Sequence[int], prompt_end: Sequence[int]) -> tuple[str, str]:
        """The text of sampled ids without stop token, and of the last tokens before them."""
        decode: Callable[[list[int]], str] = partial(self.tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
        ids, before = list(token_ids), tuple(prompt_end[-PROMPT_END_TOKENS:])
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return decode(ids), cached(self._prompt_ends, before, partial(decode, list(before)))

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_end: str = "",
        unexpected: UnexpectedCalls = "execute",
    ) -> Reply:
        if self._ships_parser:
            return parse_by_template(self.tokenizer, text, self.call_format, tools, prompt_end)
        is_open = bool(closing_tag(prompt_end))
        return parse_assistant(text, self.call_format, tools, reasoning_is_open=is_open, unexpected=unexpected)

    def parse_text(self, text: str, prompt_end: str = "") -> Reply:
        """Reasoning and text of an assistant without tools; anything that looks like a call is text."""
        reasoning, spoken = split_reasoning(text, bool(closing_tag(prompt_end)))
        return Reply(reasoning, find_harmony(spoken, {})[0] if self.call_format is HARMONY else spoken)

    def stream(self, *, with_tools: bool, prompt_end: str) -> StreamedReply:
        """A parser that turns the sampled text of a reply into deltas."""
        return StreamedReply(
            self.call_format,
            with_tools=with_tools,
            reasoning_is_open=bool(closing_tag(prompt_end)),
            holds_all=with_tools and self._ships_parser,
        )

    def closes_reasoning(self, variables: Mapping[str, Any]) -> str:
        """The tag that ends the reasoning which the template's prompts have opened; empty if they have not."""
        prompt = self.render([Message("user", _QUESTION)], self._probe_tools, add_generation_prompt=True, **variables)
        return closing_tag(prompt)

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        """eos, what the template puts behind an assistant message, and the usual end-of-turn tokens."""
        stops = {self._special[name] for name in _END_OF_TURN if name in self._special}
        if self.tokenizer.eos_token_id is not None:
            stops.add(self.tokenizer.eos_token_id)
        dialogue = [Message("user", _QUESTION), Message("assistant", _ANSWER)]
        usual = set(stops)
        for more in ((), (Message("user", _LAST),)):  # GLM ends a turn with what begins the next one
            with suppress(TemplateRefusal):
                behind = self.render([*dialogue, *more], self._probe_tools).partition(_ANSWER)[2].lstrip()
                stops |= {token_id for name, token_id in self._special.items() if behind.startswith(name)}
            usual |= set() if more else stops
        begins = {self._special[name] for name in _BEGINS_RESULT if name in self._special}
        self._begins_next = frozenset((stops - usual) | begins)
        if self.call_format is HARMONY:  # ends every message of a turn
            stops.discard(self._special.get(_HARMONY_END, -1))
        if not stops:
            raise InputError(
                "the tokenizer has no end-of-sequence token, and its chat template ends an assistant message without "
                "a special token, so a turn would never end. Set tokenizer.eos_token."
            )
        return tuple(sorted(stops))

    def _scaffold(self, replies: Sequence[Message], variables: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """The stop token's text, and the template's text before, between and after the replies' bodies."""
        stop, text = self._delta([replace(reply, text=mark(i)) for i, reply in enumerate(replies)], variables)
        return stop, split_at_marks(text, len(replies))

    def _delta(self, replies: Sequence[Message], variables: Mapping[str, Any]) -> tuple[str, str]:
        """The stop token's text and what follows it, from two renderings of a small conversation."""
        calls = tuple(
            ToolCall(reply.tool_call_id or f"call_{i}", reply.name or "tool")
            for i, reply in enumerate(replies)
            if reply.role == "tool"
        )
        refusal: PalestraError | None = None
        # some templates refuse a system message or several calls, or leave out the text beside calls
        for system, tool_calls in product(((Message("system", _SYSTEM),), ()), (calls, ()) if calls else ((),)):
            answer = Message("assistant", _ANSWER, tool_calls=tool_calls)
            if tool_calls and self._writes_text_last:
                marked = replace(tool_calls[-1], arguments={"text": _ANSWER})
                answer = Message("assistant", "", (*tool_calls[:-1], marked))
            opening = [*system, Message("user", _QUESTION), answer]
            key = (system, tuple(map(_ID_AND_NAME, tool_calls)))
            try:
                write = partial(self.render, opening, self._probe_tools, **variables)
                before = write() if variables else cached(self._openings, key, write)
                after = self.render([*opening, *replies], self._probe_tools, add_generation_prompt=True, **variables)
            except PalestraError as error:
                refusal = error
                continue
            if _QUESTION in before and _ANSWER in before and _QUESTION in after and _ANSWER in after:
                stop, text = self._difference(before, after)
                if _SYSTEM not in text:  # some write the system message into the last user message
                    return stop, text
        raise refusal or not_append_only("it leaves out what the user or the assistant said")

    @cached_property
    def _writes_text_last(self) -> bool:
        """Whether the template puts the text of a message with calls after their results, as Gemma 4's does."""
        answer = Message("assistant", _ANSWER, (ToolCall("call_0", "palestra_probe"),))
        reply = Message("tool", _LAST, tool_call_id="call_0", name="palestra_probe")
        return self._writes([Message("user", _QUESTION), answer, reply], _LAST, _ANSWER)

    def _difference(self, before: str, after: str) -> tuple[str, str]:
        """The stop token's text and what follows it, of two renderings whose second one goes on."""
        # Only what follows the answer has to agree: a template may dress the last answer differently
        # (Qwen3 adds an empty thinking block), and what the model sampled stays as it is anyway.
        if before.partition(_QUESTION)[0] != after.partition(_QUESTION)[0]:
            raise not_append_only("a later message changes the beginning of the conversation")
        old, new = before.partition(_ANSWER)[2], after.partition(_ANSWER)[2]
        stops = [*self.stop_texts, *([_HARMONY_END] if self.call_format is HARMONY else [])]
        if new.startswith(old):
            if ends := [(old.rfind(stop) + len(stop), stop) for stop in stops if stop in old]:
                end, stop = max(ends)
                return stop, new[end:]
            following = new[len(old) :]
            stop = next((stop for stop in stops if following.startswith(stop)), "")  # GLM: begins the next turn
            return stop, following.removeprefix(stop)
        # A template may close a finished conversation with one more token, or begin the next turn immediately. The text
        # must be the same up to the first stop token. In a few formats that token may differ.
        first, stop = min(((at, stop) for stop in stops if (at := new.find(stop)) >= 0), default=(0, ""))
        same = first if stop in (*_BEGINS_RESULT, _HARMONY_END) else first + len(stop)
        if not stop or not old.startswith(new[:same]):
            raise not_append_only("a later message changes the end of the assistant's message")
        return stop, new[first + len(stop) :]

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the template writes a system message that comes after the user's."""
        late = [Message("user", _QUESTION), Message("system", _SYSTEM), Message("user", _LAST)]
        return self._writes(late, _QUESTION, _SYSTEM, _LAST, add_generation_prompt=True)

    def _writes(self, messages: Sequence[Message], *texts: str, **options: Any) -> bool:
        """Whether the template takes these messages, and writes these texts of them in this order."""
        try:
            rendered = self.render(messages, self._probe_tools, **options)
        except TemplateRefusal:
            return False
        places = [rendered.find(text) for text in texts]
        return places[0] >= 0 and places == sorted(places)

    def has_variable(self, name: str) -> bool:
        return name in self._variables

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if not self.has_variable(name):
                raise UnsupportedError(f"the model's chat template has no variable {name[:100]!r}; leave it out")
