"""Chat templates by family, and prompts that are rendered once."""

from __future__ import annotations

import copy
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from palestra.core.errors import InputError
from palestra.core.messages import to_dict
from palestra.core.types import Message, ToolCall
from palestra.models.chat.encode import ReplyTemplate, SegmentTokenizer
from palestra.models.chat.prompts import family_of, prepare
from palestra.models.chat.template import PLAIN, ChatFormat

SPECIALS = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "phi3": ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<eos>", "mistral": "</s>", "phi3": "<|endoftext|>"}
STOPS = {**ENDS, "gemma": "<end_of_turn>", "phi3": "<|end|>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up a price.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Gemma 2 has it: no system role, and user and model take turns
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
OWN = {"smollm2": ("chatml", SMOLLM2), "gemma2": ("gemma", GEMMA2)}
ALL = [*SPECIALS, *OWN]


@cache
def backend(family: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in SPECIALS[family]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant the price of tea is 4.50\n\n\n \n\n>\n"] * 4, trainer)
    return tokenizer.to_str()


def plain_tokenizer(family: str, template: str | None = None):
    tokens = SPECIALS[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend(family)), bos_token=tokens[0], eos_token=ENDS[family]
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def prepared(name: str):
    """A tokenizer of the family without a template, or with a template of its own that knows no tools."""
    tokenizer = plain_tokenizer(*OWN.get(name, (name,)))
    prepare(tokenizer)
    return ChatFormat(tokenizer), tokenizer


def family(name: str) -> str:
    return OWN[name][0] if name in OWN else name


def tool(text: str, index: int = 0) -> Message:
    return Message("tool", text, tool_call_id=f"call_{index}", name="price")


def ids_of(turns):
    return [token_id for turn in turns for token_id in turn.token_ids]


def rendered(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(
        [to_dict(m) for m in messages], tools=tools, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize("name", SPECIALS)
def test_a_family_is_known_by_its_special_tokens(name):
    assert family_of(plain_tokenizer(name)) == name


@pytest.mark.parametrize("name", ALL)
def test_the_prompt_shows_all_once_and_only_the_bodies_of_results_are_the_environments(name):
    chat, tokenizer = prepared(name)
    prompt = chat.prompt([Message("system", "Be brief."), Message("user", "Price of tea?")], [TOOL])
    text = tokenizer.decode(prompt.token_ids)
    assert [text.count(part) for part in ("Be brief.", "Look up a price.", "Price of tea?")] == [1, 1, 1]
    assert text.index("Be brief.") < text.index("Price of tea?")
    assert tokenizer.convert_tokens_to_ids(STOPS[family(name)]) in chat.stop_token_ids
    turns = chat.continuation([tool("tea 4", 0), tool("milk 2", 1)])
    said = [tokenizer.decode(turn.token_ids) for turn in turns if turn.maker == "environment"]
    assert said == ["tea 4", "milk 2"]


@pytest.mark.parametrize("name", ALL)
def test_a_call_that_the_template_writes_is_read_back(name):
    chat, tokenizer = prepared(name)
    call = ToolCall("call_0", "price", {"item": 'té "x"'})
    messages = [Message("user", "?"), Message("assistant", "", (call,)), tool("PRICED")]
    text = rendered(tokenizer, messages, [TOOL])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = len(chat.prompt(messages[:1], [TOOL]).token_ids)
    end = next(i for i in range(start, len(ids)) if ids[i] in chat.stop_token_ids)
    (read,) = chat.read(ids[start : end + 1]).tool_calls
    assert (read.name, read.arguments) == (call.name, call.arguments)


texts = st.text(alphabet=st.sampled_from(list("ab 4.\n<>é日🍵{}[]")), max_size=16).filter(
    lambda text: text == text.strip() and not re.search(r"<\||</?(s|bos|eos)>|\[", text)
)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(said=texts.filter(bool), bodies=st.lists(texts, min_size=1, max_size=2), by_tool=st.booleans())
def test_growing_a_conversation_equals_rendering_it_whole(name, said, bodies, by_tool):
    chat, tokenizer = prepared(name)
    if not by_tool:
        bodies = bodies[:1]  # some families refuse two users in a row
    opening = [Message("system", "Be brief."), Message("user", "Price?")]
    replies = [tool(body, i) if by_tool else Message("user", body) for i, body in enumerate(bodies)]
    calls = tuple(ToolCall(f"call_{i}", "price") for i in range(len(bodies))) if by_tool else ()
    whole = [to_dict(m) for m in [*opening, Message("assistant", said, tool_calls=calls), *replies]]
    if chat.call_format.name == "mistral":
        for call in [c for m in whole for c in m.get("tool_calls", ())] + [m for m in whole if "tool_call_id" in m]:
            key = "id" if "function" in call else "tool_call_id"
            call[key] = call[key].replace("_", "").rjust(9, "0")
    text = tokenizer.apply_chat_template(whole, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    prompt = list(chat.prompt(opening, [TOOL]).token_ids)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text.startswith(tokenizer.decode(prompt))
    ends = [i for i, token_id in enumerate(ids) if token_id in chat.stop_token_ids]
    end = ends[sum(token_id in chat.stop_token_ids for token_id in prompt)]  # of the assistant's message
    assert ids_of(chat.continuation(replies)) == ids[end + 1 :]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(body=st.from_regex(PLAIN, fullmatch=True), by_tool=st.booleans())
def test_a_plain_reply_between_known_tokens_equals_the_whole_text_tokenised(name, body, by_tool):
    chat, _ = prepared(name)
    replies = [tool(body) if by_tool else Message("user", body)]
    found = [chat._continuation(replies, {}, True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyTemplate, "turns", lambda self, reply: None)
        found.append(chat._continuation(replies, {}, True))
    assert found[0] == found[1]


def test_without_tools_a_template_of_its_own_writes_what_it_always_wrote():
    messages = [Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye")]
    for opening in ([], [Message("system", "Be brief.")]):
        before = rendered(plain_tokenizer("chatml", SMOLLM2), [*opening, *messages])
        assert rendered(prepared("smollm2")[1], [*opening, *messages]) == before


def test_a_template_that_shows_tools_or_was_prepared_stays_as_it_is():
    template = "{{ tools }}{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    for kept in (template, prepared("smollm2")[1].chat_template):
        tokenizer = plain_tokenizer("chatml", kept)
        prepare(tokenizer)
        assert tokenizer.chat_template == kept


def test_gemma_gets_instructions_and_tools_in_the_first_user_turn():
    chat, tokenizer = prepared("gemma2")
    text = tokenizer.decode(chat.prompt([Message("system", "Be brief."), Message("user", "Tea?")], [TOOL]).token_ids)
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\nYou have access")
    assert text.endswith("\n\nTea?<end_of_turn>\n<start_of_turn>model\n")


def test_no_template_and_an_unknown_family_is_a_clear_error():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<end>")
    prepare(bare)
    assert bare.chat_template is None
    with pytest.raises(InputError, match=r"no chat template.*no known family.*set tokenizer\.chat_template"):
        ChatFormat(bare)


@pytest.mark.parametrize(
    ("file", "family_name"), [("gemma", "gemma"), ("phi3", "phi3"), ("qwen2_5", "chatml"), ("llama3", "llama3")]
)
def test_templates_of_well_known_models_take_tools(file, family_name):
    trl = importlib.util.find_spec("trl")
    path = Path(trl.origin).parent / "chat_templates" / f"{file}.jinja" if trl and trl.origin else Path("nowhere")
    if not path.exists():
        pytest.skip("TRL, which carries these templates, is not installed")
    tokenizer = plain_tokenizer(family_name, path.read_text())
    prepare(tokenizer)
    chat = ChatFormat(tokenizer)
    prompt = tokenizer.decode(chat.prompt([Message("user", "Tea?")], [TOOL]).token_ids)
    assert "Look up a price." in prompt
    turns = chat.continuation([tool("4.50")])
    assert [tokenizer.decode(turn.token_ids) for turn in turns if turn.maker == "environment"] == ["4.50"]


SHOTS = [
    Message("system", "You add numbers."),
    Message("user", "What is 1 + 2?"),
    Message("assistant", "", tool_calls=(ToolCall("call_0", "add", {"a": 1, "b": 2}),)),
    Message("tool", "3", tool_call_id="call_0", name="add"),
    Message("assistant", "3"),
]


def asked(text: str) -> list[Message]:
    return [*SHOTS, Message("user", text)]


@pytest.mark.parametrize("text", ["What is 3 + 4?", "12", "Sum: 5, 6; 7!", "a\n b", "<|im_start|>user", "", "é ß 你"])
def test_a_prompt_is_the_same_whatever_was_asked_before(tiny_tokenizer, text):
    chat, fresh = ChatFormat(tiny_tokenizer), ChatFormat(tiny_tokenizer)
    for earlier in ("What is 1 + 1?", "And 2 + 2?", text):
        chat.prompt(asked(earlier), [TOOL])
    found = chat.prompt(asked(text), [TOOL]).token_ids.tolist()
    assert found == fresh.prompt(asked(text), [TOOL]).token_ids.tolist()
    if "<|" not in text:
        rendered = chat.render(asked(text), [TOOL], add_generation_prompt=True)
        assert found == tiny_tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids


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
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens([AddedToken("<end>", special=True, **flag)])
    text = "one <end> two <end>\nthree"
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert SegmentTokenizer(tokenizer).ids(text) == expected


def test_a_tokenizer_that_treats_the_beginning_of_a_text_in_another_way_is_given_whole_texts():
    pieces = [(c, -1.0) for c in "▁abcdefghijklmnopqrstuvwxyzSENE0123456789.+\n\t "] + [("<unk>", -9.0)]
    unigram = Tokenizer(models.Unigram(pieces, len(pieces) - 1))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, additional_special_tokens=["<s>"])
    text = "ab<s>cd<s> ef"
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert SegmentTokenizer(tokenizer).ids(text) == expected
