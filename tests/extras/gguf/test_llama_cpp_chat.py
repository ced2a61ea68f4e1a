"""llama.cpp with our files: conversations as transformers renders them, and parsed tool calls."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parent))

from llama_cpp import LlamaCpp, serve_tokenizer
from small_tokenizers import CONVERSATION, MARKS, TOOLS, make_for_family

from palestra import demo
from palestra.extras.gguf.export import to_gguf
from palestra.extras.gguf.source import open_source


def written_by_llama_cpp(server: LlamaCpp, messages: list[Any], tools: list[Any] | None) -> str:
    return str(server.post("/apply-template", {"messages": messages, **({"tools": tools} if tools else {})})["prompt"])


def assert_written_alike(tokenizer: Any, server: LlamaCpp) -> None:
    for messages, tools in (
        (CONVERSATION[1:2], None),
        (CONVERSATION[:2], TOOLS),
        (CONVERSATION, TOOLS),
        (CONVERSATION[1:], TOOLS),
    ):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert written_by_llama_cpp(server, messages, tools) == expected


@pytest.mark.parametrize("family", MARKS)
def test_conversations_with_tools_are_written_as_in_training(family: str, tmp_path: Path) -> None:
    tokenizer = make_for_family(family)
    assert_written_alike(tokenizer, serve_tokenizer(tokenizer, tmp_path))


def test_the_embedded_model_calls_a_tool_in_llama_cpp(tmp_path: Path) -> None:
    """As it ships, knowing what a tool call looks like; benchmarks/export_parity.py runs the trained one."""
    source = open_source("palestra/tiny")
    server = LlamaCpp(to_gguf(source, tmp_path / "tiny.gguf", type="q8_0"), context=1024)
    assert_written_alike(source.tokenizer, server)
    question = demo.make_cases(1, held_out=True, seed=5)[0]["question"]
    messages = [{"role": "system", "content": demo.agent.instructions}, {"role": "user", "content": question}]
    body = {"messages": messages, "tools": [tool.schema for tool in demo.agent.tools], "temperature": 0}
    answer = server.post("/v1/chat/completions", body)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    call = answer["message"]["tool_calls"][0]["function"]
    item = question.removeprefix("What does a ").removesuffix(" cost?")
    assert (call["name"], call["arguments"]) == ("price", f'{{"item": "{item}"}}')
