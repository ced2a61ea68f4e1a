"""Grammars of calls and of whole turns."""

import copy
import json
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from palestra import function_tool
from palestra.core.errors import PalestraError
from palestra.models.chat import grammars as grammars_module
from palestra.models.chat.callformats import HERMES
from palestra.models.chat.grammars import CallGrammars, CallMatching, GrammarText, grammar_compiler


@function_tool
def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b


@function_tool
def say(text: str) -> str:
    """Say.

    Args:
        text: What.
    """
    return text


SCHEMAS = [add.schema, say.schema]
CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.fixture(scope="module")
def grammars(tiny_tokenizer: Any) -> CallGrammars:
    return CallGrammars(tiny_tokenizer, HERMES)


def allows(matching: CallMatching, token_id: int) -> bool:
    mask = matching.allowed()
    return mask is None or bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def follow(matching: CallMatching, tokenizer: Any, text: str, **options: Any) -> str:
    """Say the text as long as it is allowed; what was said."""
    said = []
    for token_id in tokenizer.encode(text, add_special_tokens=False, **options):
        if not allows(matching, token_id):
            break
        matching.accept(token_id)
        said.append(token_id)
    return str(tokenizer.decode(said))


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        '{"name":"add","arguments":{"a":-1,"b":2}}',
        '\n{\n  "name": "add",\n  "arguments": {\n    "a": 1\n  }\n}\n',
        '{"name": "say", "arguments": {"text": "é \\" </tool_call"}}',
    ],
)
def test_right_calls_may_be_said_and_text_goes_on_behind_them(grammars, tiny_tokenizer, call):
    text = f"Well. <tool_call>{call}</tool_call> and <tool_call>{call}</tool_call><|im_end|>"
    assert follow(grammars.of(SCHEMAS).start(), tiny_tokenizer, text) == text


@pytest.mark.parametrize(
    ("call", "right"),
    [
        ('{"name": "sub", "arguments": {}}', '{"name": "s'),
        ('{"name": "add", "arguments": {"a": "1"}}', '{"name": "add", "arguments": {"a": '),
        ('{"name": "add", "arguments": {"b": 1}}', '{"name": "add", "arguments": {"'),
        ('{"name": "add", "arguments": {"a": 1, "c": 1}}', '{"name": "add", "arguments": {"a": 1, "'),
        ("<|im_end|>", ""),
    ],
)
def test_wrong_calls_end_where_they_go_wrong(grammars, tiny_tokenizer, call, right):
    said = follow(grammars.of(SCHEMAS).start(), tiny_tokenizer, f"<tool_call>{call}</tool_call>")
    assert said.startswith("<tool_call>")
    assert f"<tool_call>{right}".startswith(said)


def test_a_tag_in_several_tokens_opens_a_call_too(grammars: CallGrammars, tiny_tokenizer: Any) -> None:
    matching = grammars.of(SCHEMAS).start()
    assert follow(matching, tiny_tokenizer, "<tool_call>", split_special_tokens=True) == "<tool_call>"
    assert not follow(matching, tiny_tokenizer, "Well")
    assert follow(matching, tiny_tokenizer, f"{CALL}</tool_call>Well") == f"{CALL}</tool_call>Well"


@pytest.mark.parametrize("tags", ["added", "text"])
def test_tags_that_are_no_special_tokens_open_and_close_a_call(tiny_tokenizer: Any, tags: str) -> None:
    state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        if "tool" in token["content"]:
            token |= {"special": False} if tags == "added" else {"content": f"<unused_{token['id']}>"}
    if tags == "text":
        names = {t["id"]: t["content"] for t in state["added_tokens"]}
        state["model"]["vocab"] = {names.get(i, text): i for text, i in state["model"]["vocab"].items()}
    backend = Tokenizer.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    assert len(tokenizer.encode("</tool_call>")) == 1 or tags == "text"
    matching = CallGrammars(tokenizer, HERMES).of(SCHEMAS).start()
    text = f"So <tool_call>{CALL}</tool_call>Well"
    assert follow(matching, tokenizer, text) == text
    assert follow(matching, tokenizer, "<tool_call>Well") == "<tool_call>"


def test_a_token_that_ends_the_tag_may_go_on_with_the_call_alone(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(['>{"name', ">Well"])
    right, wrong = tokenizer.convert_tokens_to_ids(['>{"name', ">Well"])
    matching = CallGrammars(tokenizer, HERMES).of(SCHEMAS).start()
    assert allows(matching, wrong)
    assert follow(matching, tokenizer, "so <tool_call", split_special_tokens=True) == "so <tool_call"
    assert not allows(matching, wrong)
    assert allows(matching, tokenizer.encode("x")[0])
    assert allows(matching, right)
    matching.accept(right)
    assert follow(matching, tokenizer, f"{CALL[6:]}</tool_call>Well") == f"{CALL[6:]}</tool_call>Well"


def test_a_call_in_thinking_is_only_talk(grammars: CallGrammars, tiny_tokenizer: Any) -> None:
    matching = grammars.of(SCHEMAS).start()
    thought = " <think>a <tool_call> is dear, I think</think> "
    assert follow(matching, tiny_tokenizer, thought) == thought
    assert follow(matching, tiny_tokenizer, "<tool_call>Well") == "<tool_call>"


def test_turns_of_one_grammar_do_not_meet(tiny_tokenizer: Any) -> None:
    compile_grammar = grammar_compiler(tiny_tokenizer)
    grammar = compile_grammar(json.dumps(SCHEMAS))
    assert grammar is compile_grammar(json.dumps(SCHEMAS))
    first, second = grammar.start(), grammar.start()
    follow(first, tiny_tokenizer, "<tool_call>{")
    assert second.allowed() is None
    assert follow(second, tiny_tokenizer, f"<tool_call>{CALL}") == f"<tool_call>{CALL}"
    assert follow(first, tiny_tokenizer, CALL[1:]) == CALL[1:]


@pytest.mark.parametrize("kept", [4096, 1])
def test_calls_that_begin_alike_share_their_masks_and_others_do_not(grammars, tiny_tokenizer, monkeypatch, kept):
    monkeypatch.setattr(grammars_module, "_KEPT_PLACES", kept)
    grammar = grammars.of(SCHEMAS)
    first, second, other = (grammar.start() for _ in range(3))
    begun = '<tool_call>{"name": "%s", "arguments": {"'
    for matching, name in ((first, "add"), (second, "add"), (other, "say")):
        assert follow(matching, tiny_tokenizer, begun % name) == begun % name
    assert first.allowed() == second.allowed() != other.allowed()
    assert (first.allowed() is second.allowed()) == (kept > 1)
    assert follow(second, tiny_tokenizer, 'a": 1}}</tool_call>') == 'a": 1}}</tool_call>'
    assert follow(other, tiny_tokenizer, 'a": 1}}') == ""
    assert follow(grammar.start(), tiny_tokenizer, f"<tool_call>{CALL}</tool_call>").endswith("</tool_call>")


def schema(**a: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": a}, "required": ["a"]}
    return {"type": "function", "function": {"name": "odd", "parameters": parameters}}


def test_a_schema_that_cannot_be_kept_is_refused_by_the_name_of_its_tool(grammars: CallGrammars) -> None:
    with pytest.raises(PalestraError, match=r"schema of 'odd'.*uniqueItems"):
        grammars.of([add.schema, schema(type="array", uniqueItems=True)])
    with pytest.raises(PalestraError, match=r"schema of 'odd'.*funny"):
        grammars.of([schema(type="funny")])


def test_an_unknown_format_is_a_note_and_arguments_without_a_name_are_refused(grammars, tiny_tokenizer):
    matching = grammars.of([schema(type="string", format="path")]).start()
    begun = '<tool_call>{"name": "odd", "arguments": {"a": "/x"'
    assert follow(matching, tiny_tokenizer, begun) == begun
    assert not follow(matching, tiny_tokenizer, ",")


def test_without_the_library_the_extra_is_named(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PalestraError, match=r"pip install 'palestra\[constrain\]'"):
        CallGrammars(tiny_tokenizer, HERMES)


NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
TURN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
END = "<|im_end|>"


def said(tokenizer: Any, grammar: GrammarText, text: str) -> str:
    """As much of the text as the grammar lets pass."""
    return follow(grammar_compiler(tokenizer)(str(grammar)).start(), tokenizer, text)


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
    assert said(tiny_tokenizer, grammar, TURN_CALL + END) == TURN_CALL + END
    assert said(tiny_tokenizer, grammar, f"{TURN_CALL}\n{TURN_CALL}{END}") == f"{TURN_CALL}\n{TURN_CALL}{END}"
    assert not said(tiny_tokenizer, grammar, END)
    assert "sub" not in said(tiny_tokenizer, grammar, TURN_CALL.replace("add", "sub"))


def test_either_a_call_or_an_answer(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    grammar = GrammarText(stops, (ADD,), NUMBER, one_call=True)
    for text in (TURN_CALL, '{"x": 3}'):
        assert said(tiny_tokenizer, grammar, text + END) == text + END
    assert said(tiny_tokenizer, grammar, TURN_CALL + "\n" + TURN_CALL) == TURN_CALL


def test_in_free_text_the_first_call_may_be_the_last(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    grammar = GrammarText(stops, (ADD,), one_call=True, free_text=True)
    assert said(tiny_tokenizer, grammar, f"Well. {TURN_CALL}{END}") == f"Well. {TURN_CALL}{END}"
    assert said(tiny_tokenizer, grammar, f"Well. {TURN_CALL}\n{TURN_CALL}") == f"Well. {TURN_CALL}"
    assert said(tiny_tokenizer, grammar, f"It is 3.{END}") == f"It is 3.{END}"


def test_a_schema_that_cannot_be_kept_is_refused(tiny_tokenizer: Any, stops: tuple[int, ...]) -> None:
    with pytest.raises(PalestraError, match="JSON schema"):
        grammar_compiler(tiny_tokenizer)(str(GrammarText(stops, answer={"type": "nonsense"})))
    text = json.loads(str(GrammarText(stops, answer={"type": "object"})))
    assert text["answer"] == {"type": "object"}
