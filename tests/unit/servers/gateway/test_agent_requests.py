"""Requests as coding agents send them: their own fields, hosted tools, late system messages, a look at the base URL."""

import copy
import logging

import httpx
import pytest
from real_gateway import open_attempt, with_attempt, with_gateway
from scripted_model import END, QUESTION, TOOL, completer

from palestra.core.types import Message
from palestra.models.chat.template import ChatFormat
from palestra.servers.gateway.request import ChatRequest, SamplingFields, fit_template

ADD = {"name": "add", "description": "Add.", "input_schema": TOOL["function"]["parameters"]}
FUNCTION = {"type": "function", **TOOL["function"]}
REMINDER = {"role": "system", "content": [{"type": "text", "text": "The current date is Monday."}]}
# The fields that Claude Code 2.1.197, Codex 0.169.0, and clients of OpenRouter, Qwen and Ollama send.
CLAUDE_CODE = {
    "model": "claude-opus-4-8",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {}}]}, REMINDER],
    "system": [{"type": "text", "text": "You are Claude Code."}],
    "tools": [ADD, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "u"},
}
CODEX = {
    "model": "gpt-5",
    "instructions": "You are Codex.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}],
    "tools": [FUNCTION, {"type": "namespace", "name": "multi_agent_v1", "tools": [FUNCTION]}, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "i"},
}
CHAT = {
    "model": "any",
    "messages": [QUESTION, {"role": "system", "content": "The current date is Monday."}],
    "tools": [TOOL, {"type": "custom", "custom": {"name": "apply_patch"}}],
    "verbosity": "low",
    "reasoning_effort": "high",
    "frequency_penalty": 0.5,
    "prediction": {"type": "content", "content": "x"},
    "provider": {"order": ["x"]},
    "usage": {"include": True},
    "enable_thinking": False,
    "options": {"num_ctx": 1},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("messages", CLAUDE_CODE, {"context_management", "tool web_search_20250305"}),
        ("responses", CODEX, {"client_metadata", "tool namespace", "tool web_search", "reasoning.effort"}),
        (
            "chat/completions",
            CHAT,
            {"verbosity", "provider", "usage", "enable_thinking", "options", "frequency_penalty", "prediction"}
            | {"reasoning_effort", "tool custom"},
        ),
    ],
    ids=["claude-code", "codex", "chat"],
)
def test_fields_and_hosted_tools_that_agents_send_are_ignored_with_one_log_line(
    tiny_tokenizer, caplog, path, body, ignored, stream
):
    async def ask(attempt):
        async with httpx.AsyncClient(base_url=attempt.base_url, trust_env=False) as client:
            for _ in range(2):
                answer = await client.post(f"/{path}", json={**body, "stream": stream})
                assert answer.status_code == 200, answer.text
                assert "Hello" in answer.text
        return await attempt.finish()

    with caplog.at_level(logging.WARNING, "palestra"):
        rollout = with_attempt(completer(tiny_tokenizer, lambda i: f"Hello{END}"), ask)
    assert rollout.tool_names == ("add",)
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == 1
    assert set(lines[0].partition(": ")[2].split(", ")) == ignored
    roles = [message.role for message in rollout.messages]
    assert roles[-1] == "assistant"
    assert roles.count("system") == (1 if path != "messages" else 2)


def test_a_base_url_answers_head_with_200_and_an_unknown_one_with_401(model):
    async def look(gateway):
        attempt = open_attempt(gateway)
        async with httpx.AsyncClient(trust_env=False) as client:
            urls = (attempt.anthropic_base_url, f"{attempt.anthropic_base_url}/", f"{gateway.url}/attempt/x")
            return [(await client.head(url)).status_code for url in urls]

    assert with_gateway(model, look) == [200, 200, 401]


WRITE = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
LATE = "{%- if m.role == 'system' and not loop.first -%}"
REFUSES = f"{{%- for m in messages -%}}{LATE}{{{{ raise_exception('late') }}}}{{%- endif -%}}{WRITE}{{%- endfor -%}}"
DROPS = f"{{%- for m in messages -%}}{LATE}{{%- else -%}}{WRITE}{{%- endif -%}}{{%- endfor -%}}"


@pytest.mark.parametrize("template", [REFUSES, DROPS], ids=["refused", "dropped"])
def test_a_late_system_message_is_the_users_where_the_template_has_no_place_for_it(tiny_tokenizer, template):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    request = ChatRequest(
        (
            Message("system", "s"),
            Message("user", "a"),
            Message("system", "late"),
            Message("assistant", "b"),
            Message("system", "later"),
            Message("user", "c"),
        ),
        SamplingFields(),
    )
    assert fit_template(request, ChatFormat(tokenizer)) is request
    tokenizer.chat_template = template
    fitted = fit_template(request, ChatFormat(tokenizer)).messages
    assert [(m.role, m.text) for m in fitted] == [
        ("system", "s"), ("user", "a\n\nlate"), ("assistant", "b"), ("user", "later\n\nc")
    ]  # fmt: skip
