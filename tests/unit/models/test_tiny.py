"""The embedded model: its size, its tokenizer, its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra.models.loading import LoadedModel, load_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up a price.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("palestra/tiny", device="cpu")


def test_it_has_at_most_two_million_parameters_in_eight_megabytes(tiny: LoadedModel) -> None:
    assert sum(p.numel() for p in tiny.model.parameters()) <= 2_000_000
    assert (Path(tiny.path) / "model.safetensors").stat().st_size <= 8_000_000
    assert type(tiny.model).__name__ == "Qwen3ForCausalLM"
    assert tiny.model.lm_head.weight is tiny.model.model.embed_tokens.weight


def test_special_tokens_are_single_and_end_and_pad_are_set(tiny: LoadedModel) -> None:
    specials = "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response>"
    for special in [*specials.split(), "<think>", "</think>"]:
        assert len(tiny.tokenizer.encode(special)) == 1
    assert (tiny.tokenizer.eos_token, tiny.tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    ends = tiny.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert tiny.model.generation_config.eos_token_id == ends
    assert len(tiny.tokenizer) <= tiny.model.config.vocab_size


def test_digits_are_single_tokens_wherever_they_stand(tiny: LoadedModel) -> None:
    for text in ("1234", " 1234", '{"a": 1234, "b": 1234}', "x1234y"):
        pieces = [tiny.tokenizer.decode([i]) for i in tiny.tokenizer.encode(text)]
        assert [p for p in pieces if any(c.isdigit() for c in p)] == list("1234" * text.count("1234"))


@pytest.mark.parametrize("text", ["Grüße, 東京! 🙂\n\ttab", '{"name": "x", "arguments": {}}', "  two  spaces  ", ""])
def test_text_comes_back_from_tokens_unchanged(tiny: LoadedModel, text: str) -> None:
    assert tiny.tokenizer.decode(tiny.tokenizer.encode(text)) == text


def test_the_template_renders_tools_calls_and_results(tiny: LoadedModel) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two prices?"},
        {"role": "assistant", "content": "", "tool_calls": [call("price", item="mug"), call("now")]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "noon"},
    ]
    text = tiny.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.\n"
        '{"name": "price", "arguments": {"item": "string"}} Look up a price.\n'
        '{"name": "now", "arguments": {}}<|im_end|>\n'
        "<|im_start|>user\nTwo prices?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "price", "arguments": {"item": "mug"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    plain = tiny.tokenizer.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
    assert plain == "<|im_start|>user\nHi.<|im_end|>\n"


def test_it_knows_the_form_of_a_call_for_a_tool_that_it_has_never_seen(tiny: LoadedModel) -> None:
    """Forced to call, it copies the tool's and the argument's name from its prompt and closes the JSON."""
    tool = {
        "type": "function",
        "function": {
            "name": "florin",
            "description": "Look up the florin.",
            "parameters": {"type": "object", "properties": {"who": {"type": "string"}}},
        },
    }
    prompt = tiny.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the florin of Anna?"}],
        tools=[tool],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = torch.tensor([tiny.tokenizer.encode(prompt + "<tool_call>")])
    out = tiny.model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    text = tiny.tokenizer.decode(out)
    assert text.endswith("\n</tool_call><|im_end|>")
    assert json.loads(text.partition("</tool_call>")[0]) == {"name": "florin", "arguments": {"who": "Anna"}}
