"""An assistant's message -> the tokens with which the model would have said it, and the startup check of tool calls.

For demonstrations, which the model did not sample. The template renders a small conversation that ends with one: its
text behind the generation prompt is the model's turn. The check: it must be read back as the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from palestra.core.errors import InputError, PalestraError, UnsupportedError
from palestra.core.types import Message, ToolCall
from palestra.models.chat.encode import ForgedTexts, Piece, TemplateRefusal, not_append_only, with_texts
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.toolcalls import TAGS, closing_tag, split_reasoning, strip_reasoning

Schemas = Sequence[dict[str, Any]]
_QUESTION, _NEXT = "PALESTRAQUESTION", "PALESTRANEXT"


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """The tokens of a turn with its stop token, and its message as `ChatFormat.read` gives it back."""

    token_ids: list[int]
    message: Message
    left_out: tuple[str, ...] = ()  # "text", "reasoning": what the template does not write


def write_reply(
    chat: ChatFormat, message: Message, tools: Schemas = (), *, after: str = "user", prompt_end: Sequence[int] = ()
) -> WrittenReply:
    """The turn of an assistant's message behind a message of the role `after`. `prompt_end` are the tokens before it.

    Some templates leave out reasoning, or the text of a message with calls. PalestraError if the tokens cannot be read
    back as the same text and calls.
    """
    reasoning = message.reasoning
    refusal: PalestraError | None = None
    for attempt, thought in _attempts(message, reasoning):
        try:
            prompt, pieces = _pieces(chat, attempt, tools, after, thought)
        except PalestraError as error:
            refusal = refusal or error
            continue
        before, whole = _ids(chat, [Piece(prompt, False)]), _ids(chat, [Piece(prompt, False), *pieces])
        ids = whole[len(before) :] if whole[: len(before)] == before else _ids(chat, pieces)
        read = chat.read(ids, tools, prompt_end)
        calls = [(call.name, call.arguments, call.error, call.format) for call in read.tool_calls]
        expected = [(call.name, call.arguments, None, "") for call in attempt.tool_calls]
        if read.text == strip_reasoning(attempt.text) and calls == expected:
            has_text = read.text or not strip_reasoning(message.text)
            whole_thought = (reasoning or split_reasoning(message.text)[0]).strip()
            has_thought = whole_thought in "".join(piece.text for piece in pieces)
            return WrittenReply(ids, read, ("text",) * (not has_text) + ("reasoning",) * (not has_thought))
        refusal = refusal or InputError(
            f"the chat template writes the assistant's message {_shown(message)} so that it is read back as "
            f"{_shown(read)}. Change the message, or take the conversation out"
        )
    assert refusal is not None
    raise refusal


def _attempts(message: Message, reasoning: str) -> Iterator[tuple[Message, str]]:
    """The message and its reasoning as they are, then with less, since templates differ in what they write."""
    yield message, reasoning
    thought, spoken = split_reasoning(message.text)
    if thought and not reasoning:
        message, reasoning = replace(message, text=spoken.strip()), thought
        yield message, reasoning
    if reasoning:
        yield message, ""
    if message.tool_calls and message.text.strip():
        yield from ((replace(message, text=""), each) for each in dict.fromkeys((reasoning, "")))


def _shown(message: Message) -> str:
    calls = "".join(f" [{call.name or 'a call'} {call.error or call.arguments}]" for call in message.tool_calls)
    return f"{message.text!r:.200}{calls:.300}"


def _pieces(chat: ChatFormat, message: Message, tools: Schemas, after: str, reasoning: str) -> tuple[str, list[Piece]]:
    """The prompt of a small conversation, and what the template writes behind it, up to and with the stop token."""
    forged = ForgedTexts(chat.pieces.has_special)
    blank, blank_reasoning = with_texts(message, forged.marked), forged.marked(reasoning)
    refusal: PalestraError = not_append_only("it ends an assistant's message without a stop token")
    alone: list[Piece] = []
    for context, following in _surroundings(message, tools, after):
        try:
            prompt = chat.render(context, tools, add_generation_prompt=True)
            if prompt.rstrip().endswith(tuple(closing for _, closing in TAGS)):  # as without thinking
                reasoning = blank_reasoning = ""
            text = written = _written(chat, prompt, [*context, message, *following], tools, reasoning)
            if forged.texts:
                text = _written(chat, prompt, [*context, blank, *following], tools, blank_reasoning)
        except TemplateRefusal as error:
            refusal = error
            continue
        pieces = forged.cut(written, text)
        for i, piece in enumerate(pieces):
            places = [] if piece.is_body else [(piece.text.find(stop), stop) for stop in chat.stop_texts]
            if places := [place for place in places if place[0] >= 0]:
                at, stop = min(places)
                end = Piece(piece.text[: at + len(stop)], False)
                return prompt, [*alone, Piece(stop, False)] if alone else [*pieces[:i], end]
        alone = [] if following else pieces  # without the next message, which may change this one
    raise refusal


def _surroundings(message: Message, tools: Schemas, after: str) -> Iterator[tuple[list[Message], list[Message]]]:
    """Messages before and behind an assistant's message. Alone at the end, templates write it as it is sampled; but
    some end a turn with what begins the next message, and some refuse calls without results."""
    calls = message.tool_calls
    next_one: list[Message] = [Message("tool", f"{_NEXT}{i}", (), call.id, call.name) for i, call in enumerate(calls)]
    question = [Message("user", _QUESTION)]
    contexts = [question]
    if after == "tool" and tools:
        name = str(tools[0].get("function", tools[0]).get("name"))
        call = ToolCall("call00000", name)
        contexts.insert(0, [*question, Message("assistant", "", (call,)), Message("tool", "4", (), call.id, name)])
    for context in contexts:
        yield context, []
        yield context, next_one or [Message("user", _NEXT)]


def _written(chat: ChatFormat, prompt: str, messages: Sequence[Message], tools: Schemas, reasoning: str) -> str:
    """What the template writes behind the generation prompt, up to the next message."""
    whole = chat.render(messages, tools, last_reasoning=reasoning)
    start = common_start(prompt, whole)
    if (same := _same_but_for_spaces(prompt, whole, start)) is not None:
        return whole[same:].partition(_NEXT)[0]
    written, opened = whole[start:].partition(_NEXT)[0], prompt[start:]
    if closing := closing_tag(opened):  # the prompt opens reasoning that finished messages leave out
        return f"{reasoning}\n{closing}\n\n{written.lstrip()}"
    if closing := next((tag for _, tag in TAGS if tag in opened), ""):  # the prompt has empty reasoning
        written = written.removeprefix(closing)
    if split_reasoning(opened)[1].strip() or (closing and closing in written):
        raise not_append_only("it writes an assistant's message differently from its generation prompt")
    return written


def _same_but_for_spaces(prompt: str, whole: str, start: int) -> int | None:
    """Where the prompt ends in a conversation whose template is careless of whitespace; None if it differs."""
    end = start
    while start < len(prompt):
        if prompt[start] == whole[end : end + 1]:
            start, end = start + 1, end + 1
        elif prompt[start].isspace():
            start += 1
        elif whole[end : end + 1].isspace():
            end += 1
        else:
            return None
    return end


def common_start(prompt: str, whole: str) -> int:
    """Where the assistant's message begins: behind the prompt, or at the tag in which the two begin to differ.

    A template may close the reasoning that its prompt opens.
    """
    if whole.startswith(prompt):
        return len(prompt)
    common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if common < len(prompt):
        at = max(whole.rfind(bracket, 0, common) for bracket in "<[")
        if at >= 0 and not any(bracket in whole[at:common] for bracket in ">]"):
            return at
    return common


def _ids(chat: ChatFormat, pieces: Sequence[Piece]) -> list[int]:
    return [token_id for _, ids in chat.pieces.encode(pieces).runs for token_id in ids]


_TOOL = "palestra_lookup"
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {
        "text": 'a "b", {c} <d> é\u65e5',
        "count": 3,
        "share": -0.5,
        "flag": True,
        "nested": {"list": [1, "two", False], "x": {}},
    },
    {"text": "42", "count": 0},
)
_TYPES = {"text": "string", "count": "integer", "share": "number", "flag": "boolean", "nested": "object"}
_PROPERTIES = {name: {"type": kind, "description": "A value."} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}
_SCHEMA = {
    "type": "function",
    "function": {"name": _TOOL, "description": "Look something up.", "parameters": _PARAMETERS},
}
_RESULT = "PALESTRARESULT"
# tokenizer -> its template, and why the check failed
_checked: WeakKeyDictionary[Any, dict[tuple[str, bool], str | None]] = WeakKeyDictionary()


def tool_call_problem(chat: ChatFormat, *, appends: bool = True) -> str | None:
    """The reason why tool calls cannot be used: the model's own template does not write them so that they are read back
    or, with `appends`, takes no results. None if they can be used. Computed once per tokenizer and template."""
    known = _checked.setdefault(chat.tokenizer, {})
    key = (str(chat.tokenizer.chat_template), appends)
    if key in known:
        return known[key]
    reason = None
    try:
        chat.prompt([Message("user", _QUESTION)], [_SCHEMA])
        if appends:
            chat.continuation([Message("tool", _RESULT, tool_call_id="call_0", name=_TOOL)])
        # some templates refuse several calls in one message, or leave out all but the first
        for arguments in () if _read_back(chat, _ARGUMENTS) == list(_ARGUMENTS) else _ARGUMENTS:
            read = _read_back(chat, [arguments])
            if read != [arguments]:
                reason = f"of a call with the arguments {arguments} the template writes text that is read as {read}"
                break
    except PalestraError as error:
        reason = str(error).rstrip(".")
    known[key] = reason
    return reason


def takes_parallel_calls(chat: ChatFormat) -> bool:
    """Whether the template writes several calls of one message, so that they are read back."""
    try:
        return _read_back(chat, _ARGUMENTS) == list(_ARGUMENTS)
    except PalestraError:
        return False


def check_tool_calls(chat: ChatFormat, *, appends: bool = True) -> None:
    """Raise PalestraError if there is a `tool_call_problem`."""
    if reason := tool_call_problem(chat, appends=appends):
        raise UnsupportedError(
            f"tool calls of this model cannot be used: {reason}. Its chat template was taken to write the call format "
            f"{chat.call_format.name!r}, like this:\n{chat.call_format.example}\n"
            "Use a model whose template is supported (docs/models.md lists them), or set tokenizer.chat_template to "
            "one that writes calls in a supported format, and save the tokenizer."
        )


def _read_back(chat: ChatFormat, arguments: Sequence[dict[str, Any]]) -> list[Any]:
    """The arguments, or the error, of each call in what the template writes for calls with these arguments."""
    calls = tuple(ToolCall(f"call_{i}", _TOOL, each) for i, each in enumerate(arguments))
    question, answer = Message("user", _QUESTION), Message("assistant", "", calls)
    results = [Message("tool", f"{_RESULT}{i}", tool_call_id=call.id, name=_TOOL) for i, call in enumerate(calls)]
    prompt = chat.render([question], [_SCHEMA], add_generation_prompt=True)
    try:
        whole = chat.render([question, answer, *results], [_SCHEMA])
    except PalestraError:
        if len(calls) == 1:
            raise
        return []
    start = common_start(prompt, whole)
    written = whole[start:].partition(_RESULT)[0]
    ends = [end for stop in chat.stop_texts if (end := written.find(stop)) >= 0]
    read = chat.parse(written[: min(ends, default=len(written))], [_SCHEMA], whole[:start]).calls
    return [call.error or (f"a call in the format {call.format}" if call.format else call.arguments) for call in read]
