"""Prompts that begin alike are rendered and tokenised once, and come out as if each were the first."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from palestra.core.types import Message, ToolCall
from palestra.models.chat.encode import SegmentTokenizer
from palestra.models.chat.template import ChatFormat

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
SHOTS = [
    Message("system", "You add numbers."),
    Message("user", "What is 1 + 2?"),
    Message("assistant", "", tool_calls=(ToolCall("call_0", "add", {"a": 1, "b": 2}),)),
    Message("tool", "3", tool_call_id="call_0", name="add"),
    Message("assistant", "3"),
]


def asked(text: str) -> list[Message]:
    return [*SHOTS, Message("user", text)]


def whole(chat: ChatFormat, tokenizer: Any, text: str) -> list[int]:
    """Rendered and tokenised without any memory."""
    rendered = chat.render(asked(text), [TOOL], add_generation_prompt=True)
    return list(tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", ["What is 3 + 4?", "12", "Sum: 5, 6; 7!", "a\n b", "<|im_start|>user", "", "é ß 你"])
def test_a_prompt_is_the_same_whatever_was_asked_before(tiny_tokenizer, text):
    chat, fresh = ChatFormat(tiny_tokenizer), ChatFormat(tiny_tokenizer)
    for earlier in ("What is 1 + 1?", "And 2 + 2?", text):
        chat.prompt(asked(earlier), [TOOL])
    assert chat.prompt(asked(text), [TOOL]).token_ids.tolist() == fresh.prompt(asked(text), [TOOL]).token_ids.tolist()
    if "<|" not in text:
        assert chat.prompt(asked(text), [TOOL]).token_ids.tolist() == whole(fresh, tiny_tokenizer, text)


def test_another_beginning_or_other_tools_are_another_prompt(tiny_tokenizer):
    chat = ChatFormat(tiny_tokenizer)
    with_tool, without = chat.prompt(asked("Why?"), [TOOL]), chat.prompt(asked("Why?"))
    shorter = chat.prompt(asked("Why?")[1:], [TOOL])
    assert len({tuple(turn.token_ids.tolist()) for turn in (with_tool, without, shorter)}) == 3


def test_a_template_that_looks_at_the_question_is_asked_each_time(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% if 'please' in messages[-1].content %}{{ messages[0].content + ' (polite)' }}{% endif %}"
        + tokenizer.chat_template
    )
    chat = ChatFormat(tokenizer)
    rude, polite = (chat.prompt(asked(text)).token_ids.tolist() for text in ("Add 1 and 2", "Add 1 and 2 please"))
    assert tokenizer.decode(polite).startswith("You add numbers. (polite)")
    assert not tokenizer.decode(rude).startswith("You add numbers.")


@pytest.mark.parametrize("flag", [{"lstrip": True}, {"rstrip": True}])
def test_a_tokenizer_whose_tokens_eat_whitespace_is_given_whole_texts(tiny_tokenizer, flag):
    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens([AddedToken("<end>", special=True, **flag)])
    text = "one <end> two <end>\nthree"
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert SegmentTokenizer(tokenizer).ids(text) == expected


def test_a_tokenizer_that_treats_the_beginning_of_a_text_in_another_way_is_given_whole_texts():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [(c, -1.0) for c in "▁abcdefghijklmnopqrstuvwxyzSENE0123456789.+\n\t "] + [("<unk>", -9.0)]
    backend = Tokenizer(models.Unigram(pieces, len(pieces) - 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<s>"])
    text = "ab<s>cd<s> ef"
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert SegmentTokenizer(tokenizer).ids(text) == expected
