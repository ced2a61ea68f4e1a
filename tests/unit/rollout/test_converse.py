"""A chat session, question by question, with a policy whose answers the test has written."""

import asyncio
from dataclasses import dataclass, field

import pytest

from palestra import function_tool
from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams, Turn
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.converse import ChatSession

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'


@dataclass(eq=False)
class TokenSession:
    token_ids: list[int]


@dataclass
class Scripted:
    """Says the given texts in turn, whatever the session; None is an answer that fails."""

    tokenizer: object
    script: list[str | None]
    sessions: list[TokenSession] = field(default_factory=list)
    open_now: int = 0
    version: int = 0

    def open(self, prompt_ids):
        self.open_now += 1
        self.sessions.append(TokenSession(list(prompt_ids)))
        return self.sessions[-1]

    def append(self, session, token_ids):
        session.token_ids += token_ids

    def close(self, session):
        self.open_now -= 1

    async def sample(self, session, params):
        text = self.script.pop(0)
        if text is None:
            raise PalestraError("the context is full")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        session.token_ids += ids
        finish = "stop" if text.endswith("<|im_end|>") else "length"
        return Turn("model", ids, [-0.1] * len(ids), finish=finish)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def session_of(tiny_tokenizer):
    def make(*script):
        policy = Scripted(tiny_tokenizer, list(script))
        limits = AttemptLimits(SamplingParams(100))
        return ChatSession(policy, ChatFormat(tiny_tokenizer), [add], limits, "Be brief."), policy

    return make


def ask(chat, text):
    messages = []
    stop = asyncio.run(chat.say(text, messages.append))
    return stop, [(message.role, message.text) for message in messages]


def test_tools_are_called_and_each_message_is_told(session_of):
    chat, _ = session_of(CALL, "It is 5.<|im_end|>")
    assert ask(chat, "2 + 3?") == ("answered", [("assistant", ""), ("tool", "5"), ("assistant", "It is 5.")])
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]


def test_the_second_question_goes_on_in_the_tokens_of_the_first(session_of, tiny_tokenizer):
    chat, policy = session_of("<think>hm</think>Hello.<|im_end|>", "Bye.<|im_end|>")
    ask(chat, "Hi")
    before = list(policy.sessions[0].token_ids)
    ask(chat, "So long")
    (session,) = policy.sessions
    assert session.token_ids[: len(before)] == before, "thinking included: nothing is rendered again"
    assert tiny_tokenizer.decode(session.token_ids[len(before) :]) == (
        "\n<|im_start|>user\nSo long<|im_end|>\n<|im_start|>assistant\nBye.<|im_end|>"
    )


def test_after_an_answer_that_was_cut_off_the_conversation_is_rendered_anew(session_of, tiny_tokenizer):
    chat, policy = session_of("On and on", "Fine.<|im_end|>")
    assert ask(chat, "Hi")[0] == "context_full"
    ask(chat, "Stop")
    text = tiny_tokenizer.decode(policy.sessions[1].token_ids)
    assert "On and on<|im_end|>\n<|im_start|>user\nStop" in text


def test_a_failed_answer_leaves_the_conversation_as_it_was(session_of):
    chat, policy = session_of("Hello.<|im_end|>", None, "Yes.<|im_end|>")
    ask(chat, "Hi")
    before = list(chat.messages)
    with pytest.raises(PalestraError, match="full"):
        ask(chat, "Still there?")
    assert chat.messages == before
    assert policy.open_now == 0
    assert ask(chat, "Again?")[0] == "answered"


def test_reset_forgets_all_but_the_instructions(session_of):
    chat, policy = session_of("Hello.<|im_end|>")
    ask(chat, "Hi")
    chat.reset()
    assert [message.text for message in chat.messages] == ["Be brief."]
    assert policy.open_now == 0


def test_the_message_being_written_can_be_looked_at(session_of, tiny_tokenizer):
    chat, policy = session_of(CALL, "It is five.<|im_end|>")
    seen, sample = [], policy.sample

    async def slowly(session, params):
        half = tiny_tokenizer.encode("It is", add_special_tokens=False)
        session.token_ids += half
        seen.append(chat.so_far)
        del session.token_ids[-len(half) :]
        return await sample(session, params)

    policy.sample = slowly
    ask(chat, "2 + 3?")
    assert seen == ["It is", "It is"], "of each message by itself"
    assert chat.so_far == ""
