"""Grammars of calls and of whole turns."""

import copy
import json
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from palestra.core.errors import MissingPackageError, UnsupportedError
from palestra.models.chat import grammars as grammars_module
from palestra.models.chat.grammars import GrammarText, grammar_compiler


def tool(tool_name: str, required: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [required]}
    return {"type": "function", "function": {"name": tool_name, "parameters": parameters}}


INTEGER = {"type": "integer"}
ADD = tool("add", "a", a=INTEGER, b=INTEGER)
SCHEMAS = [ADD, tool("say", "text", text={"type": "string"})]
CALL = '{"name": "add", "arguments": {"a": 1}}'


def calls_of(tokenizer: Any, tools: list[dict[str, Any]] = SCHEMAS) -> Any:
    """The grammar of calls in free text."""
    return grammar_compiler(tokenizer)(json.dumps(tools))


@pytest.fixture(scope="module")
def grammar(_loaded_tiny):
    return calls_of(_loaded_tiny.tokenizer)


def allows(matching: Any, token_id: int) -> bool:
    mask = matching.allowed()
    return mask is None or bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def follow(matching: Any, tokenizer: Any, text: str, **options: Any) -> str:
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
def test_right_calls_may_be_said_and_text_goes_on_behind_them(grammar, tiny_tokenizer, call):
    text = f"Well. <tool_call>{call}</tool_call> and <tool_call>{call}</tool_call><|im_end|>"
    assert follow(grammar.start(), tiny_tokenizer, text) == text


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
def test_wrong_calls_end_where_they_go_wrong(grammar, tiny_tokenizer, call, right):
    said = follow(grammar.start(), tiny_tokenizer, f"<tool_call>{call}</tool_call>")
    assert said.startswith("<tool_call>")
    assert f"<tool_call>{right}".startswith(said)


def test_a_tag_in_several_tokens_opens_a_call_too(grammar, tiny_tokenizer):
    matching = grammar.start()
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template="<tool_call>")
    assert len(tokenizer.encode("</tool_call>")) == 1 or tags == "text"
    matching = calls_of(tokenizer).start()
    text = f"So <tool_call>{CALL}</tool_call>Well"
    assert follow(matching, tokenizer, text) == text
    assert follow(matching, tokenizer, "<tool_call>Well") == "<tool_call>"


def test_a_token_that_ends_the_tag_may_go_on_with_the_call_alone(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(['>{"name', ">Well"])
    right, wrong = tokenizer.convert_tokens_to_ids(['>{"name', ">Well"])
    matching = calls_of(tokenizer).start()
    assert allows(matching, wrong)
    assert follow(matching, tokenizer, "so <tool_call", split_special_tokens=True) == "so <tool_call"
    assert not allows(matching, wrong)
    assert allows(matching, tokenizer.encode("x")[0])
    assert allows(matching, right)
    matching.accept(right)
    assert follow(matching, tokenizer, f"{CALL[6:]}</tool_call>Well") == f"{CALL[6:]}</tool_call>Well"


def test_a_call_in_thinking_is_only_talk(grammar, tiny_tokenizer):
    matching = grammar.start()
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
def test_calls_that_begin_alike_share_their_masks_and_others_do_not(tiny_tokenizer, monkeypatch, kept):
    monkeypatch.setattr(grammars_module, "_KEPT_PLACES", kept)
    grammar = calls_of(tiny_tokenizer)
    first, second, other = (grammar.start() for _ in range(3))
    begun = '<tool_call>{"name": "%s", "arguments": {"'
    for matching, name in ((first, "add"), (second, "add"), (other, "say")):
        assert follow(matching, tiny_tokenizer, begun % name) == begun % name
    assert first.allowed() == second.allowed() != other.allowed()
    assert (first.allowed() is second.allowed()) == (kept > 1)
    assert follow(second, tiny_tokenizer, 'a": 1}}</tool_call>') == 'a": 1}}</tool_call>'
    assert follow(other, tiny_tokenizer, 'a": 1}}') == ""
    assert follow(grammar.start(), tiny_tokenizer, f"<tool_call>{CALL}</tool_call>").endswith("</tool_call>")


@pytest.mark.parametrize(
    ("argument", "words"), [({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"type": "funny"}, "funny")]
)
def test_a_schema_that_cannot_be_kept_is_refused_by_the_name_of_its_tool(tiny_tokenizer, argument, words):
    with pytest.raises(UnsupportedError, match=f"schema of 'odd'.*{words}"):
        calls_of(tiny_tokenizer, [ADD, tool("odd", "a", a=argument)])


def test_an_unknown_format_is_a_note_and_arguments_without_a_name_are_refused(tiny_tokenizer):
    matching = calls_of(tiny_tokenizer, [tool("odd", "a", a={"type": "string", "format": "path"})]).start()
    begun = '<tool_call>{"name": "odd", "arguments": {"a": "/x"'
    assert follow(matching, tiny_tokenizer, begun) == begun
    assert not follow(matching, tiny_tokenizer, ",")


def test_without_the_library_the_extra_is_named(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'palestra\[constrain\]'"):
        calls_of(tiny_tokenizer)


NUMBER = {"type": "object", "properties": {"x": INTEGER}, "required": ["x"], "additionalProperties": False}
TURN_CALL = f"<tool_call>\n{CALL}\n</tool_call>"
END = "<|im_end|>"
ANSWER, REQUIRED, FREE = {"answer": NUMBER}, {"tools": (ADD,)}, {"tools": (ADD,), "one_call": True, "free_text": True}
EITHER = {"tools": (ADD,), "answer": NUMBER, "one_call": True}


@pytest.mark.parametrize(
    ("grammar", "said", "refused"),
    [
        (ANSWER, '{"x": 12}' + END, ""),
        (ANSWER, "", "It is 12."),
        (ANSWER, '{"x": ', END),
        (ANSWER, '{"x": 12}', " and more"),
        (REQUIRED, TURN_CALL + END, ""),
        (REQUIRED, f"{TURN_CALL}\n{TURN_CALL}{END}", ""),
        (REQUIRED, "", END),
        (REQUIRED, '<tool_call>\n{"name": "', 'sub", "arguments": {}}'),
        (EITHER, TURN_CALL + END, ""),
        (EITHER, '{"x": 3}' + END, ""),
        (EITHER, TURN_CALL, "\n" + TURN_CALL),
        (FREE, f"Well. {TURN_CALL}{END}", ""),
        (FREE, f"Well. {TURN_CALL}", "\n" + TURN_CALL),
        (FREE, f"It is 3.{END}", ""),
    ],
)
def test_a_turn_is_calls_an_answer_by_its_schema_or_free_text_with_one_call(tiny_tokenizer, grammar, said, refused):
    text = GrammarText((tiny_tokenizer.convert_tokens_to_ids(END),), **grammar)
    found = follow(grammar_compiler(tiny_tokenizer)(str(text)).start(), tiny_tokenizer, said + refused)
    assert found.rstrip() == said.rstrip()


def test_a_schema_that_cannot_be_kept_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(UnsupportedError, match="JSON schema"):
        grammar_compiler(tiny_tokenizer)(str(GrammarText((2,), answer={"type": "nonsense"})))
