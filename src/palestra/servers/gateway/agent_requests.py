"""Requests of agents that cannot be changed: fields and tools that the gateway lacks are left out and logged once.

Coding agents send fields for their own provider (`context_management` of Claude Code, `client_metadata` of Codex) and
offer hosted tools. Fields that would change the answer (`logit_bias`, `audio`, …) and misspelt ones are still refused.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from palestra.core.types import Message
from palestra.models.chat.template import ChatFormat
from palestra.servers.gateway.anthropic_messages import CountBody
from palestra.servers.gateway.request import ChatRequest
from palestra.servers.openai.sampling_fields import NO_EFFECT, changes_answer

log = logging.getLogger("palestra")

# An inference server rejects these. Agents send them as hints, and a training does not sample by its clients' values.
_HINTS = frozenset("prediction web_search_options frequency_penalty presence_penalty length_penalty".split())
_MISSPELT = 0.85  # similarity from which an unknown field counts as a misspelt known one
_MAX_LOGGED = 200  # names, of at most 60 characters each: clients choose them


@dataclass(slots=True)
class AgentRequests:
    """Prepares the requests of all agents of a run; each name that is left out is logged once."""

    _logged: set[str] = field(default_factory=set)

    def clean(self, raw: dict[str, Any], form: type[BaseModel], chat: ChatFormat) -> dict[str, Any]:
        """The body without fields and tools that the gateway lacks and the answer does not depend on."""
        left_out = [name for name, value in raw.items() if _is_extra(name, value, form)]
        body = {name: value for name, value in raw.items() if name not in left_out}
        if isinstance(tools := body.get("tools"), list):
            own = "custom" if issubclass(form, CountBody) else "function"
            types = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
            hosted = [tool for tool, kind in zip(tools, types, strict=True) if isinstance(kind, str) and kind != own]
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
    return replace(request, messages=tuple(_as_user_messages(messages)))


def _as_user_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Neighbouring user texts are joined: such templates often want user and assistant to alternate."""
    last: Message | None = None
    for i, message in enumerate(messages):
        is_late = i > 0 and message.role == "system"
        message = replace(message, role="user") if is_late else message
        if last is not None and last.role == message.role == "user":
            last = replace(last, text=f"{last.text}\n\n{message.text}")
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _is_extra(name: str, value: Any, form: type[BaseModel]) -> bool:
    """Whether a field can be left out."""
    if name in form.model_fields:
        return False
    if name in NO_EFFECT or name in _HINTS:
        return True
    return not changes_answer(name, value) and not difflib.get_close_matches(
        name[:100], form.model_fields, 1, _MISSPELT
    )
