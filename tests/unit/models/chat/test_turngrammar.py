"""Grammars of whole turns: an answer by a JSON schema, required calls, one call at most."""

import json
from typing import Any

import pytest

from palestra.core.errors import PalestraError
from palestra.models.chat.grammars import GrammarText, grammar_compiler

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
END = "<|im_end|>"


def said(tokenizer: Any, grammar: GrammarText, text: str) -> str:
    """As much of the text as the grammar lets pass."""
    matching = grammar_compiler(tokenizer)(str(grammar)).start()
    ids = []
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        mask = matching.allowed()
        if mask is not None and not mask[token_id >> 3] >> (token_id & 7) & 1:
            break
        matching.accept(token_id)
        ids.append(token_id)
    return tokenizer.decode(ids)


@pytest.fixture
def stops(tiny_tokenizer: Any) -> tuple[int, ...]:
    return (tiny_tokenizer.convert_tokens_to_ids(END),)


def test_an_answer_keeps_to_its_schema_and_ends_when_it_is_whole(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    grammar = GrammarText(stops, answer=NUMBER)
    assert said(tiny_tokenizer, grammar, f'{{"x": 12}}{END}') == f'{{"x": 12}}{END}'
    assert not said(tiny_tokenizer, grammar, "It is 12.")
    assert END not in said(tiny_tokenizer, grammar, f'{{"x": {END}')
    assert said(tiny_tokenizer, grammar, '{"x": 12} and more') in ('{"x": 12}', '{"x": 12} ')


def test_a_required_call_is_all_that_may_be_said(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    grammar = GrammarText(stops, (ADD,))
    assert said(tiny_tokenizer, grammar, CALL + END) == CALL + END
    assert said(tiny_tokenizer, grammar, f"{CALL}\n{CALL}{END}") == f"{CALL}\n{CALL}{END}"
    assert not said(tiny_tokenizer, grammar, END)
    assert "sub" not in said(tiny_tokenizer, grammar, CALL.replace("add", "sub"))


def test_either_a_call_or_an_answer(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    grammar = GrammarText(stops, (ADD,), NUMBER, one_call=True)
    for text in (CALL, '{"x": 3}'):
        assert said(tiny_tokenizer, grammar, text + END) == text + END
    assert said(tiny_tokenizer, grammar, CALL + "\n" + CALL) == CALL


def test_in_free_text_the_first_call_may_be_the_last(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    grammar = GrammarText(stops, (ADD,), one_call=True, free_text=True)
    assert said(tiny_tokenizer, grammar, f"Well. {CALL}{END}") == f"Well. {CALL}{END}"
    assert said(tiny_tokenizer, grammar, f"Well. {CALL}\n{CALL}") == f"Well. {CALL}"
    assert said(tiny_tokenizer, grammar, f"It is 3.{END}") == f"It is 3.{END}"


def test_a_schema_that_cannot_be_kept_is_refused(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    with pytest.raises(PalestraError, match="JSON schema"):
        grammar_compiler(tiny_tokenizer)(str(GrammarText(stops, answer={"type": "nonsense"})))
    text = json.loads(str(GrammarText(stops, answer={"type": "object"})))
    assert text["answer"] == {"type": "object"}
