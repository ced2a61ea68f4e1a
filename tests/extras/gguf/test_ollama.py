"""Models for Ollama: the Modelfile, the exact call, and what happens without Ollama."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parent))

from go_template import render
from small_tokenizers import CONVERSATION, MARKS, TOOLS, make_byte_level, make_for_family

from palestra.core.errors import InputError, ServiceError, SettingError, UnsupportedError
from palestra.extras.gguf.export import family_of, modelfile, template_of, to_ollama
from palestra.extras.gguf.source import ModelSource, open_source

QWEN_TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501


def as_ollama_gives_them(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The values that Ollama passes to a template."""

    def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        properties = {name: {"Type": p["type"]} for name, p in function["parameters"]["properties"].items()}
        return Tool(
            tool,
            Function={
                "Name": function["name"],
                "Description": function["description"],
                "Parameters": {"Properties": properties},
            },
        )

    def message_of(message: dict[str, Any]) -> dict[str, Any]:
        calls = [
            {"Function": {"Name": call["function"]["name"], "Arguments": call["function"]["arguments"]}}
            for call in message.get("tool_calls", [])
        ]
        return {"Role": message["role"], "Content": message["content"], "ToolCalls": calls}

    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return {
        "System": system,
        "Messages": [message_of(message) for message in messages],
        "Tools": [tool_of(tool) for tool in tools] if tools else None,
    }


class Tool(dict[str, Any]):
    """Shown as its JSON, with the fields that a template may ask for."""

    def __init__(self, schema: dict[str, Any], **fields: Any) -> None:
        super().__init__(schema)
        self.fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


def without_blanks(text: str) -> str:
    """JSON's blanks, which Ollama leaves out, and the ids of calls, which older Ollamas do not know."""
    text = text.replace(', "id": "call00001"', "").replace(', "id": "call00002"', "")
    text = text.replace(', "call_id": "call00001"', "").replace(', "call_id": "call00002"', "")
    return text.replace('": ', '":').replace(', "', ',"').replace("}, {", "},{")


def tokenizer_of(family: str) -> Any:
    if family in MARKS:
        return make_for_family(family)
    tokenizer = make_byte_level()
    tokenizer.chat_template = QWEN_TEMPLATE + ("{# <think> #}" if family == "qwen3" else "")
    return tokenizer


@pytest.mark.parametrize("family", ["chatml", "qwen2", "qwen3", "llama3", "mistral", "gemma", "phi3", "palestra/tiny"])
def test_the_template_writes_what_the_models_own_writes(family: str, tiny_tokenizer: Any) -> None:
    tokenizer = tiny_tokenizer if family == "palestra/tiny" else tokenizer_of(family)
    assert family_of(tokenizer) == family
    for messages in (CONVERSATION[:2], CONVERSATION[:5], CONVERSATION, CONVERSATION[1:]):
        for tools in (None, TOOLS):
            expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            expected = expected.removeprefix("<s>")  # Ollama puts it in front by itself
            written = render(template_of(family), as_ollama_gives_them(messages, tools))
            if family == "mistral":
                written = written.replace("</s>", tokenizer.eos_token)
            exact = family == "palestra/tiny"
            assert written == expected if exact else without_blanks(written) == without_blanks(expected)


def test_llama_31_has_its_own_template_for_tools() -> None:
    tokenizer = make_for_family("llama3")
    tokenizer.chat_template += "{# Given the following functions #}"
    assert family_of(tokenizer) == "llama3.1"
    written = render(template_of("llama3.1"), as_ollama_gives_them(CONVERSATION[:2], TOOLS[:1]))
    assert written.startswith("<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nCutting Knowledge")
    assert "user<|end_header_id|>\n\nGiven the following functions" in written
    assert written.endswith(
        "red lamp cost, and what is 1 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_qwen3_gets_an_empty_reasoning_block_when_thinking_is_off() -> None:
    values = as_ollama_gives_them(CONVERSATION[:2], None)
    assert render(template_of("qwen3"), {**values, "IsThinkSet": True, "Think": False}).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert render(template_of("qwen3"), {**values, "IsThinkSet": True, "Think": True}).endswith("assistant\n")


@pytest.fixture
def source() -> ModelSource:
    return replace(open_source("palestra/tiny"), instructions="Use the tools.\nBe brief.")


def test_the_modelfile_is_complete(source: ModelSource) -> None:
    source.generation.temperature, source.generation.top_k = 0.7, 20
    assert modelfile(source, "tiny-q8_0.gguf") == (
        "FROM ./tiny-q8_0.gguf\n"
        f'TEMPLATE """{template_of("palestra/tiny")}"""\n'
        'SYSTEM """Use the tools.\nBe brief."""\n'
        "PARAMETER num_ctx 2048\n"
        "PARAMETER temperature 0.7\n"
        "PARAMETER top_k 20\n"
        'PARAMETER stop "<|im_start|>"\n'
        'PARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "<|endoftext|>"\n'
    )


def test_a_system_message_that_the_template_brings_is_kept(source: ModelSource) -> None:
    tokenizer = make_for_family("chatml")
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Smol.<|im_end|>\n{% endif %}"
    tokenizer.chat_template = default + tokenizer.chat_template
    assert 'SYSTEM """You are Smol."""' in modelfile(replace(source, tokenizer=tokenizer, instructions=""), "a.gguf")


def test_without_ollama_the_files_are_complete_and_the_command_is_returned(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    made = to_ollama(source, "my-agent", tmp_path / "out")
    assert not made.created
    assert made.command == f"ollama create my-agent -f {tmp_path}/out/Modelfile"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Modelfile", "my-agent-q8_0.gguf"]
    assert made.modelfile.read_text() == modelfile(source, "my-agent-q8_0.gguf")
    assert made.gguf.read_bytes().startswith(b"GGUF")


def stand_in(folder: Path, exit_code: int = 0) -> Path:
    """An `ollama` that records its calls."""
    folder.mkdir()
    program = folder / "ollama"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as file:\n"
        "    file.write(json.dumps({'args': sys.argv[1:], 'modelfile': open(sys.argv[4]).read()}) + '\\n')\n"
        f"print('starting', file=sys.stderr)\nsys.exit({exit_code} and 'could not connect to ollama server')\n"
    )
    program.chmod(0o755)
    return folder / "calls"


def test_where_ollama_is_the_model_is_created_by_one_call(source, tmp_path, monkeypatch):
    calls = stand_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    made = to_ollama(source, "me/my-agent:latest", tmp_path / "out", type="f16")
    assert made.created
    [call] = [json.loads(line) for line in calls.read_text().splitlines()]
    assert call["args"] == ["create", "me/my-agent:latest", "-f", str(tmp_path / "out" / "Modelfile")]
    assert call["modelfile"] == modelfile(source, "me-my-agent-latest-f16.gguf")


def test_an_ollama_that_fails_is_quoted_and_the_files_stay(source, tmp_path, monkeypatch):
    stand_in(tmp_path / "bin", exit_code=1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ServiceError, match=r"could not connect to ollama server\. The files are complete"):
        to_ollama(source, "my-agent", tmp_path / "out")
    assert (tmp_path / "out" / "my-agent-q8_0.gguf").exists()


def test_bad_names_instructions_and_templates_are_rejected_before_anything_is_written(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SettingError, match="'my agent' is not a valid name in Ollama"):
        to_ollama(source, "my agent", out)
    with pytest.raises(InputError, match="three quotation marks"):
        to_ollama(replace(source, instructions='say """hi"""'), "a", out)
    strange = make_byte_level()
    strange.chat_template = "{{ messages }}"
    with pytest.raises(UnsupportedError, match=r"supported are palestra/tiny, chatml, qwen2"):
        to_ollama(replace(source, tokenizer=strange), "a", out)
    strange.chat_template = None
    with pytest.raises(InputError, match="has no chat template"):
        to_ollama(replace(source, tokenizer=strange), "a", out)
    assert not out.exists()
