"""The form between the three dialects and the conversations: fields of requests, answers, tool choice and grammars."""

from __future__ import annotations

import json
import marshal
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from palestra.core.errors import InputError, SettingError, UnsupportedError, did_you_mean
from palestra.core.types import Message, SamplingParams
from palestra.models.chat.grammars import GrammarText
from palestra.models.chat.streaming import Delta
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.toolcalls import strip_reasoning
from palestra.servers.openai.completer import SEED_STRIDE, Completer, Completion

# Unsupported fields that would change the response, with the values that are accepted because they change nothing.
_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((None, True), "add_generation_prompt detokenize parallel_tool_calls"),
    (
        (None,),
        "allowed_token_ids audio chat_template ebnf guided_grammar guided_json guided_regex json_schema "
        "lora_path prediction prompt_logprobs regex structural_tag token_ids_logprob truncate_prompt_tokens "
        "web_search_options",
    ),
    ((None, []), "bad_words documents functions"),
    ((None, 1), "best_of length_penalty"),
    (
        (None, False),
        "continue_final_message echo include_stop_str_in_output no_stop_trim return_hidden_states "
        "skip_special_tokens use_beam_search",
    ),
    ((None, 0), "frequency_penalty min_new_tokens min_tokens presence_penalty"),
    ((None, {}), "logit_bias"),
    ((None, ["text"]), "modalities"),
    ((None, {"type": "text"}), "response_format"),
    ((None, ""), "suffix"),
)
NOT_BUILT = {name: values for values, names in _NEUTRAL_VALUES for name in names.split()}
# Fields about the caller, which change nothing in the response.
NO_EFFECT = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id rid "
    "priority log_metrics spaces_between_special_tokens betas cache_control inference_geo".split()
)
_GREEDY_BELOW = 1e-5  # logits divided by less are no numbers any more
_QUOTED = 80  # characters of a refused value
MAX_STOPS, MAX_STOP_LENGTH, _MAX_GRAMMAR = 64, 256, 1 << 18
MAX_PATTERNS = 10_000  # characters of regular expressions in a schema, which take 10 us each to compile
_PATTERN = re.compile(r'"pattern": "(?:[^"\\]|\\.)*+"')
_ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}

StopId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
StopText = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stop = StopId | StopText | Annotated[list[StopId | StopText], Field(max_length=MAX_STOPS)]


class RequestForm(BaseModel):
    """The body of a request in one API's form."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    tool_kind: ClassVar[str] = "function"  # the type of the tools that an agent may offer; others are hosted ones

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Self:
        """Validate the known fields; an unsupported field that would change the response is rejected."""
        known = {}
        for name, value in raw.items():
            if name in cls.model_fields:
                known[name] = value
            elif changes_answer(name, value):
                raise UnsupportedError(f"{name}={short(value)} is not supported by this server; leave it out")
            elif name not in NOT_BUILT and name not in NO_EFFECT:
                hint = did_you_mean(name[:100], cls.model_fields)
                raise SettingError(f"{short(name)} is no field that this server knows; leave it out.{hint}")
        return cls.model_validate(known)


class SamplingFields(RequestForm):
    """Sampling fields of all forms; a missing or null field has the form's default."""

    n: int | None = Field(None, ge=1, le=256)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop: Stop | None = None
    stop_token_ids: list[StopId] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool = False
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    grammar: str | None = Field(None, max_length=_MAX_GRAMMAR)  # tools' schemas, as our own RemotePolicy sends them

    @property
    def choices(self) -> int:
        return self.n or 1

    def params(self, eos: tuple[int, ...], room: int, default_new_tokens: int) -> SamplingParams:
        """`room` is what the context has left; stops may be strings or token ids, and add to the model's own."""
        stops = self.stop if isinstance(self.stop, list) else [self.stop] if self.stop is not None else []
        limit = self.max_completion_tokens or self.max_tokens or self.max_new_tokens or default_new_tokens
        top_k = self.top_k or 0
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(
            max_new_tokens=min(limit, room),
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=self.top_p or 1.0,
            top_k=top_k if 0 < top_k < 1 << 30 else 0,  # -1 and 2**30 mean "all" to other servers
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop_token_ids=(
                *(() if self.ignore_eos else eos),
                *(s for s in stops if isinstance(s, int)),
                *(self.stop_token_ids or ()),
            ),
            stop=tuple(s for s in stops if isinstance(s, str) and s),
            grammar=self.grammar,
            seed=random.getrandbits(62) if self.seed is None else self.seed % (1 << 62),
        )


def changes_answer(name: str, value: Any) -> bool:
    """Whether a field is one that is not supported, with a value that would change the response."""
    return name in NOT_BUILT and value not in NOT_BUILT[name]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next assistant message, `fields.n` times. Without `reads_calls`, tool calls stay text."""

    messages: tuple[Message, ...]
    fields: SamplingFields
    tools: tuple[dict[str, Any], ...] = ()  # in OpenAI's form, as chat templates take them
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    reads_calls: bool = True
    grammar: str | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Number of prompt tokens, and how many of them were computed before."""

    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One assistant message with its tokens."""

    message: Message  # its calls have the ids that the client knows
    thinking: str
    completion: Completion
    size: PromptSize
    context_ids: Sequence[int]  # the tokens of its session, of which the prompt's come first

    @property
    def is_cut_off(self) -> bool:
        return self.completion.finish != "stop"

    @property
    def stop_text(self) -> str | None:
        """The stop sequence that ended it, if one did."""
        return self.completion.matched if isinstance(self.completion.matched, str) else None


Piece = tuple[int, "PromptSize | Delta | ChatAnswer | None"]  # of a stream: the choice, and what comes


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; those of OpenAI's Chat Completions have no name."""

    data: dict[str, Any] | str
    name: str | None = None


def fit_template(request: ChatRequest, chat: ChatFormat) -> ChatRequest:
    """System messages after the first message become user messages where the template has no place for them."""
    messages = request.messages
    if not any(message.role == "system" for message in messages[1:]) or chat.takes_late_system:
        return request
    fitted: list[Message] = []
    for message in messages:
        if fitted and message.role == "system":
            message = replace(message, role="user")
        if fitted and fitted[-1].role == message.role == "user":  # such templates often want the roles to alternate
            fitted[-1] = replace(fitted[-1], text=f"{fitted[-1].text}\n\n{message.text}")
        else:
            fitted.append(message)
    return replace(request, messages=tuple(fitted))


def params_of(
    request: ChatRequest, run: SamplingParams, by_client: bool, limit: int, seed: int, index: int = 0
) -> SamplingParams:
    """Sampling parameters of one turn: the run's or, with `by_client`, the request's. `index` is that of the choice.

    In a training the run decides: an agent with temperature=0 would explore nothing. The client's stop sequences and
    limits always apply.
    """
    fields = request.fields
    asked = fields.params(run.stop_token_ids, limit, limit)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    changed: dict[str, Any] = {n: getattr(asked, n) for n in names if by_client and getattr(fields, n) is not None}
    if by_client and fields.seed is not None:
        seed = asked.seed + index * SEED_STRIDE
    return replace(
        run,
        max_new_tokens=asked.max_new_tokens,
        stop=(*run.stop, *asked.stop, *request.stop),
        stop_token_ids=asked.stop_token_ids,
        grammar=request.grammar or run.grammar,
        seed=seed,
        **changed,
    )


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`required`: a call of `only`, or of any tool. With `none`, tool calls are text."""

    mode: Literal["auto", "none", "required"] = "auto"
    only: tuple[str, ...] = ()
    one_call: bool = False


def function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as training prompts show it, without other keys of clients (`strict`)."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnsupportedError(f"the tool {short(tool.get('type'))} is not supported; only functions with a name are")
    fields = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": fields}


def openai_choice(value: Any, parallel: bool | None) -> ToolChoice:
    """`tool_choice` of OpenAI's dialects; the forms that name a function differ in how deep its name lies."""
    one_call = parallel is False
    if value in (None, "auto", "none", "required"):
        return ToolChoice(value or "auto", one_call=one_call)
    if isinstance(value, dict) and value.get("type") == "function":
        name = value.get("function", value).get("name")
        if isinstance(name, str):
            return ToolChoice("required", (name,), one_call)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools", value)
        names = tuple(tool.get("function", tool).get("name", "") for tool in allowed.get("tools", ()))
        return ToolChoice("required" if allowed.get("mode") == "required" else "auto", names, one_call)
    raise UnsupportedError(f"tool_choice={short(value)} is not supported; use auto, none, required or one function")


def json_schema(form: Any, name: str) -> dict[str, Any] | None:
    """The schema that `response_format` (or its like in the other dialects) asks for, if any."""
    kind = None if form is None else form.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = form.get("json_schema", form).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise UnsupportedError(
            f"{name}={short(form)} is not supported; use text, json_object, or json_schema with a schema"
        )
    return schema


def grammar_of(
    model: Completer,
    tools: Sequence[dict[str, Any]],
    choice: ToolChoice,
    schema: dict[str, Any] | None,
    variables: Mapping[str, Any],
) -> str | None:
    """The text of the grammar that a turn must follow; None for free text.

    `variables` of the chat template decide whether the prompt opens the reasoning.
    """
    known = {tool.get("function", {}).get("name"): tool for tool in tools}
    if unknown := [name for name in choice.only if name not in known]:
        raise InputError(f"tool_choice names {unknown[0]!r}, which is not among the tools")
    if choice.mode == "required" and not tools:
        raise SettingError("tool_choice requires a call, and there are no tools; give some, or use auto")
    callable_tools = () if choice.mode == "none" else tuple(known[n] for n in choice.only) or tuple(tools)
    is_bound = schema is not None or choice.mode == "required"
    if not is_bound and not (callable_tools and (choice.one_call or choice.only)):
        return None
    stops = model.chat.stop_token_ids
    if is_bound:
        answer = None if choice.mode == "required" else schema
        close = model.chat.closes_reasoning(variables)
        text = str(GrammarText(stops, callable_tools, answer, choice.one_call, close))
        if (length := sum(map(len, _PATTERN.findall(text)))) > MAX_PATTERNS:
            raise InputError(f"the schema's patterns have {length} characters; use at most {MAX_PATTERNS}")
        return text
    loose = tuple({**t, "function": {**t["function"], "parameters": _ANY_ARGUMENTS}} for t in callable_tools)
    return str(GrammarText(stops if choice.one_call else (), loose, one_call=choice.one_call, free_text=True))


# Keys of messages, by which a request finds its conversation. A client often sends the history not letter by letter as
# it got it (docs/gateway.md); keys are equal where the difference does not count: order, spacing and number format of
# JSON, ids of tool calls, thinking, and whitespace at the end.

Key = tuple[Any, ...]
_MAX_CACHED = 2048  # characters of a value whose key is kept
_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def request_keys(messages: Sequence[Message]) -> list[Key]:
    """The key of each message. A tool result counts by which of the last calls it answers, whatever their ids."""
    keys: list[Key] = []
    positions: dict[str | None, int] = {}
    for message in messages:
        if message.role == "assistant":
            positions = {call.id: i for i, call in enumerate(message.tool_calls)}
            keys.append(reply_keys(message)[0])
        elif message.role == "tool":
            place = positions.get(message.tool_call_id, message.tool_call_id)
            result_key = _cached_result_key if len(message.text) <= _MAX_CACHED else _result_key
            keys.append(("tool", place, result_key(message.text)))
        else:
            keys.append((message.role, message.name, message.text.rstrip()))
    return keys


def reply_keys(message: Message) -> tuple[Key, ...]:
    """All keys that match a reply: its text without thinking and outer whitespace, and the values of its calls.

    The second one is without text: some clients drop that of a message with tool calls.
    """
    calls: list[Key] = []
    for call in message.tool_calls:  # every request of a conversation brings those of all its calls again
        marshalled = marshal.dumps(call.arguments, 2)
        is_short = len(marshalled) <= _MAX_CACHED
        arguments = marshalled_key(marshalled) if is_short else value_key(call.arguments)
        calls.append((call.name, arguments, call.error))
    text = strip_reasoning(message.text)
    full = ("assistant", text, tuple(calls))
    return (full, ("assistant", "", full[2])) if text and calls else (full,)


@lru_cache(8192)
def marshalled_key(marshalled: bytes) -> str:
    return value_key(marshal.loads(marshalled))


def value_key(value: Any) -> str:
    """A JSON value without the order of its keys; numbers as doubles, which is all that JavaScript keeps of them."""
    return _to_json(_as_doubles(value))


def _as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_doubles(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_doubles(each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0  # -0.0 is 0.0
        except OverflowError:
            return str(value)
    return value


def _result_key(text: str) -> str:
    """The key of a tool result: JSON objects and lists by value, otherwise the text."""
    body = text.strip()
    if body[:1] in ("{", "["):
        try:
            return "json " + value_key(json.loads(body))
        except (ValueError, RecursionError):
            pass
    return "text " + text.rstrip()


_cached_result_key = lru_cache(8192)(_result_key)
