"""The form between the three dialects and the conversations: requests, answers, tool choice and grammars."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from palestra.core.errors import InputError, SettingError, UnsupportedError
from palestra.core.types import Message, SamplingParams
from palestra.models.chat.grammars import GrammarText
from palestra.models.chat.streaming import Delta
from palestra.models.chat.template import ChatFormat
from palestra.servers.openai.completer import SEED_STRIDE, Completer, Completion
from palestra.servers.openai.sampling_fields import NO_EFFECT, RequestForm, SamplingFields, changes_answer, short

log = logging.getLogger("palestra")

MAX_PATTERNS = 10_000  # characters of regular expressions in a schema, which take 10 us each to compile
_PATTERN = re.compile(r'"pattern": "(?:[^"\\]|\\.)*+"')
_ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}
# An inference server rejects these. Agents send them as hints, and a training does not sample by its clients' values.
_HINTS = frozenset("prediction web_search_options frequency_penalty presence_penalty length_penalty".split())
_MISSPELT = 0.85  # similarity from which an unknown field counts as a misspelt known one
_MAX_LOGGED = 200  # names, of at most 60 characters each: clients choose them


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


@dataclass(slots=True)
class AgentRequests:
    """Prepares the requests of agents that cannot be changed; each name that is left out is logged once per run.

    Coding agents send fields for their own provider (`context_management` of Claude Code, `client_metadata` of Codex)
    and offer hosted tools. Misspelt fields and those that would change the answer (`logit_bias`, `audio`) are refused.
    """

    _logged: set[str] = field(default_factory=set)

    def clean(self, raw: dict[str, Any], form: type[RequestForm], chat: ChatFormat) -> dict[str, Any]:
        """The body without fields and tools that the gateway lacks and the answer does not depend on."""
        left_out = [name for name, value in raw.items() if _is_extra(name, value, form)]
        body = {name: value for name, value in raw.items() if name not in left_out}
        if isinstance(tools := body.get("tools"), list):
            typed = [tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("type"), str)]
            hosted = [tool for tool in typed if tool["type"] != form.tool_kind]
            body["tools"] = [tool for tool in tools if tool not in hosted]
            left_out += [f"tool {tool['type']}" for tool in hosted]
        if not chat.has_variable("reasoning_effort"):
            reasoning = body.get("reasoning")
            if body.pop("reasoning_effort", None) is not None:
                left_out.append("reasoning_effort")
            if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
                body["reasoning"] = {**reasoning, "effort": None}
                left_out.append("reasoning.effort")
        names = [ascii(name[:60])[1:-1] for name in left_out if name not in NO_EFFECT]
        new = [name for name in names if name not in self._logged]
        if new and len(self._logged) < _MAX_LOGGED:
            self._logged.update(new)
            log.warning("ignored in requests of agents: %s", ", ".join(dict.fromkeys(new)))
        return body


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


def _is_extra(name: str, value: Any, form: type[RequestForm]) -> bool:
    known = form.model_fields
    if name in known or name in NO_EFFECT or name in _HINTS:
        return name not in known
    return not (changes_answer(name, value) or difflib.get_close_matches(name[:100], known, 1, _MISSPELT))


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
