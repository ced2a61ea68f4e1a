"""Conversations as rollouts: the model's tokens are what it would have said, and nothing else is trained."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import rollout

from palestra import demo
from palestra.core.config import RunConfig
from palestra.core.conversations import Conversation, conversation_of
from palestra.core.errors import InputError, UnreadableFileError
from palestra.core.files import write_jsonl
from palestra.core.group_codec import rollout_to_dict
from palestra.core.messages import to_dict, with_unique_ids
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Lineage, Message, Rollout, SamplingParams, Turn
from palestra.models.chat.template import ChatFormat
from palestra.policy.local import LocalPolicy
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.converse import converse
from palestra.train.batch import group_advantages, has_signal, to_batch
from palestra.train.demonstrations import TooLongError, demonstration, demonstrations, read_run, run_conversations

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import model_families  # noqa: E402

sys.path.remove(str(SCRIPTS))


def of_each(family: Any) -> Any:
    skip = pytest.mark.skipif(not family.path.exists(), reason=f"{family.path.name} is not there: make test-templates")
    return pytest.param(family, id=family.name, marks=skip)


EACH = [of_each(family) for family in model_families.FAMILIES]


def tool(name: str) -> dict[str, Any]:
    properties = {"item": {"type": "string"}, "count": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Look up.", "parameters": parameters}}


TOOLS = [tool("price"), tool("stock")]


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


BOTH = [call("a23456789", "price", item="tea"), call("b23456789", "stock", item="<|eot_id|>")]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Price of tea?"},
    {"role": "assistant", "content": "", "tool_calls": [call("abc123def", "price", item='black "tea"', count=2)]},
    {"role": "tool", "tool_call_id": "abc123def", "content": "It is 4.50"},
    {"role": "assistant", "content": "It costs 4.50, not <|im_end|> or </s>."},
    {"role": "user", "content": "And both?"},
    {"role": "assistant", "content": "", "tool_calls": BOTH},
    {"role": "tool", "tool_call_id": "b23456789", "content": "five"},
    {"role": "tool", "tool_call_id": "a23456789", "content": "four"},
    {"role": "assistant", "content": "Four, and five."},
]


def shop(messages: list[dict[str, Any]] = MESSAGES, tools: Any = TOOLS) -> Conversation:
    return conversation_of(messages, tools, "shop.jsonl, line 1")


def shop_with(changes: dict[int, dict[str, Any]]) -> Conversation:
    """The conversation with fields of some messages changed, by their number."""
    return shop([message | changes.get(i, {}) for i, message in enumerate(MESSAGES)])


def chat_named(name: str) -> ChatFormat:
    family = next(family for family in model_families.FAMILIES if family.name == name)
    if not family.path.exists():
        pytest.skip(f"{family.path.name} is not there: make test-templates")
    return model_families.chat_of(family)


def model_turns(found: Rollout) -> list[Turn]:
    return [turn for turn in found.turns if turn.maker == "model"]


def read_back(found: Rollout, chat: ChatFormat) -> list[Message]:
    """What the agent loop would read of each turn of the model."""
    messages, before = [], []
    for turn in found.turns:
        if turn.maker == "model":
            messages.append(chat.read(turn.token_ids.tolist(), TOOLS, before))
        before += turn.token_ids.tolist()
    return messages


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(each.name, each.arguments) for each in message.tool_calls]


@pytest.mark.parametrize("family", EACH)
def test_every_family_is_trained_on_the_assistants_messages_and_nothing_else(family):
    chat = model_families.chat_of(family)
    found = demonstration(shop(), chat)
    said = read_back(found, chat)
    expected = [m for m in shop().messages if m.role == "assistant"]
    texts = [m.text for m in said if not m.tool_calls]
    assert texts == [m.text for m in expected if not m.tool_calls]
    calls = [each for message in said for each in calls_of(message)]
    assert calls == [each for message in expected for each in calls_of(message)]
    assert said == [m for m in found.messages if m.role == "assistant"]
    for turn in model_turns(found):
        assert int(turn.token_ids[-1]) in chat.stop_token_ids
        assert turn.finish == "stop"
        assert np.isnan(turn.logprobs).all()
    untrained = chat.tokenizer.decode([i for t in found.turns if t.maker != "model" for i in t.token_ids])
    assert "It costs" not in untrained
    for heard in ("Price of tea?", "And both?", "four", "five"):
        assert heard in untrained
    assert "PALESTRA" not in untrained


@pytest.mark.parametrize("family", EACH)
def test_the_tokens_are_those_of_an_agent_loop_in_which_the_model_says_the_same(family):
    """Replies come behind each turn as `continuation` has them, by the ids that are read out of the turn."""
    chat = model_families.chat_of(family)
    found = demonstration(shop(MESSAGES[:4]), chat)
    prompt, first, *between, last = found.turns
    assert prompt == chat.prompt([Message("user", "Price of tea?")], TOOLS)
    said = chat.read(first.token_ids.tolist(), TOOLS, prompt.token_ids.tolist())
    reply = Message("tool", "It is 4.50", (), said.tool_calls[0].id, "price")
    assert tuple(between) == tuple(chat.continuation([reply], last_token=int(first.token_ids[-1])))
    assert last.maker == "model"


def sampled(tiny: Any, count: int) -> tuple[ChatFormat, list[dict[str, Any]], list[Rollout]]:
    """Answers of the embedded model to questions of the demo, sampled by our engine."""
    chat = ChatFormat(tiny.tokenizer)
    policy = LocalPolicy(tiny.model, tiny.tokenizer, kv_memory_gib=0.05, self_check=False)
    limits = AttemptLimits(SamplingParams(200, temperature=0.5, seed=3, stop_token_ids=chat.stop_token_ids))
    system = Message("system", demo.agent.fixed_instructions)
    questions = [str(case.input) for case in demo.suite.cases[:count]]

    async def all_answers() -> list[Rollout]:
        asked = [[system, Message("user", question)] for question in questions]
        return [await converse(policy, chat, messages, demo.agent.tools, limits) for messages in asked]

    return chat, [tool.schema for tool in demo.agent.tools], asyncio.run(all_answers())


def test_a_sampled_rollout_told_as_a_conversation_has_the_sampled_tokens(tiny):
    chat, schemas, rollouts = sampled(tiny, 6)
    good = [
        r for r in rollouts if r.stop == "answered" and all(c.error is None for m in r.messages for c in m.tool_calls)
    ]
    assert sum(bool(message.tool_calls) for r in good for message in r.messages) >= 4
    for each in good:
        told = [to_dict(message, arguments_as_text=True) for message in each.messages]
        found = demonstration(conversation_of(told, schemas), chat)
        assert [turn.maker for turn in found.turns] == [turn.maker for turn in each.turns]
        for ours, theirs in zip(found.turns, each.turns, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert with_unique_ids(found.messages) == list(each.messages)  # rollouts number their calls through


def test_a_demonstration_trains_with_advantage_1_and_has_signal(tiny_tokenizer):
    found = demonstration(shop(), ChatFormat(tiny_tokenizer))
    group = Group(found.problem_id, (found,))
    advantages = group_advantages([group], RunConfig().train, {})
    assert has_signal(group, advantages[0])
    batch = to_batch([group], advantages, mask_truncated=True)
    trained = batch.token_ids[batch.policy_mask].tolist()
    assert trained == [i for turn in model_turns(found) for i in turn.token_ids.tolist()]
    assert batch.advantages[batch.policy_mask].tolist() == [1.0] * len(trained)


def test_a_message_with_weight_0_is_context(tiny_tokenizer):
    chat = ChatFormat(tiny_tokenizer)
    found, whole = demonstration(shop_with({3: {"weight": 0}}), chat), demonstration(shop(), chat)
    assert len(model_turns(found)) == len(model_turns(whole)) - 1
    ids = [np.concatenate([turn.token_ids for turn in each.turns]) for each in (found, whole)]
    assert np.array_equal(*ids)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5", "GLM 4.5", "gpt-oss", "Nemotron 3 Nano"])
def test_reasoning_is_trained_in_every_turn_where_the_template_writes_it(name):
    chat, places = chat_named(name), (1, 3, 8)
    found = demonstration(shop_with({place: {"reasoning_content": f"Thought {place}."} for place in places}), chat)
    text = "".join(chat.tokenizer.decode(turn.token_ids) for turn in model_turns(found))
    assert [text.count(f"Thought {place}.") for place in places] == [1, 1, 1]
    assert read_back(found, chat) == [m for m in found.messages if m.role == "assistant"]


def test_reasoning_and_text_that_the_template_does_not_write_are_counted(caplog):
    thinks = shop_with({1: {"content": "Let me see.", "reasoning_content": "Hm."}})
    found = demonstrations([thinks, shop()], chat_named("Llama 3.1"))
    assert [rollout.info.get("left_out") for rollout in found] == [["reasoning", "text beside calls"], None]
    for part in ("reasoning", "text beside calls"):
        assert f"no {part} for 1 of 2 conversations" in caplog.text


def test_a_conversation_that_is_too_long_is_refused_or_skipped_and_counted(tiny_tokenizer, caplog):
    chat = ChatFormat(tiny_tokenizer)
    short = shop([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], ())
    size = sum(len(turn.token_ids) for turn in demonstration(short, chat).turns)
    with pytest.raises(TooLongError, match=r"shop.jsonl, line 1: .* tokens"):
        demonstration(shop(), chat, max_tokens=size)
    assert len(demonstrations([shop(), short], chat, max_tokens=size)) == 1
    assert "1 of 2 conversations do not fit" in caplog.text


WRITTEN = '<tool_call>\n{"name": "price", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        (MESSAGES, [tool("price")], "calls 'stock'"),
        (MESSAGES, [], "has no tools"),
        ([MESSAGES[0], {"role": "assistant", "content": WRITTEN}], TOOLS, "read back as"),
    ],
)
def test_what_cannot_be_trained_is_named_with_its_conversation(tiny_tokenizer, messages, tools, says):
    with pytest.raises(InputError, match=rf"^shop\.jsonl, line 1: .*{says}"):
        demonstration(shop(messages, tools), ChatFormat(tiny_tokenizer))


def test_the_agents_tools_take_precedence_over_those_of_the_conversation(tiny_tokenizer):
    chat = ChatFormat(tiny_tokenizer)
    assert demonstration(shop(tools=()), chat, TOOLS).turns == demonstration(shop(), chat).turns
    with pytest.raises(InputError, match="calls 'price'"):
        demonstration(shop(), chat, [tool("other")])


def run_with(tmp_path: Path, *rollouts: Rollout) -> RunFolder:
    write_jsonl(tmp_path / "rollouts.jsonl", (rollout_to_dict(each) for each in rollouts))
    return RunFolder(tmp_path)


def test_an_earlier_run_gives_each_passed_rollout_once_the_best_of_each_problem_first(tmp_path):
    folder = run_with(
        tmp_path,
        rollout(0.5, problem="a", ids=(3, 9), passed=True, version=4),
        rollout(1.0, problem="a", ids=(4, 9), version=7),
        rollout(1.0, problem="a", ids=(4, 9), version=8),
        rollout(0.9, problem="a", ids=(5, 9), passed=False),
        rollout(1.0, problem="b", ids=(6, 9)),
        rollout(1.0, problem="b", ids=(7, 9), stop="truncated"),
        rollout(problem="b", error="broken"),
    )
    found = read_run(folder)
    said = [(r.problem_id, r.turns[1].token_ids.tolist()) for r in found]
    assert said == [("a", [4, 9]), ("b", [6, 9]), ("a", [3, 9])]
    for each in found:
        assert each.advantages.tolist() == [1.0] * 4
        assert each.turns[1].versions.tolist() == [0, 0]
        assert np.isnan(each.turns[1].logprobs).all()
    assert [r.problem_id for r in read_run(folder, per_problem=1)] == ["a", "b"]


def test_other_conversations_of_a_rollout_are_demonstrations_of_their_own(tmp_path):
    other = Lineage(rollout(ids=(8, 9)).turns, (), "answered")
    untrained = Lineage((Turn("template", (1, 2)),), (), "answered")
    folder = run_with(tmp_path, rollout(ids=(3, 9), lineages=(other, untrained)))
    assert [r.turns[1].token_ids.tolist() for r in read_run(folder)] == [[3, 9], [8, 9]]
    assert all(not r.lineages for r in read_run(folder))


def test_an_earlier_run_of_another_model_gives_conversations(tmp_path):
    folder = run_with(tmp_path, rollout(text="5"), rollout(text="5", ids=(7, 9)), rollout(text="6"))
    assert [c.messages[-1].text for c in run_conversations(folder, TOOLS)] == ["5", "6"]
    with pytest.raises(UnreadableFileError, match=r"no rollouts\.jsonl"):
        read_run(RunFolder(tmp_path / "other"))
