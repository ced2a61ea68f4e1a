"""A chat session, question by question, with a policy whose answers the test has written."""

import asyncio

import pytest
from builders import CALL_TEXT as CALL
from builders import ScriptedPolicy, add

from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.converse import ChatSession


@pytest.fixture
def session_of(tiny_tokenizer):
    """A session with a policy that says the given texts in turn; None is an answer that fails."""

    def make(*script):
        def text(number):
            if (said := script[number]) is None:
                texts.append(None)
                raise PalestraError("the context is full")
            return said

        texts: list[None] = []
        policy = ScriptedPolicy(tiny_tokenizer, lambda number: text(number + len(texts)))
        chat = ChatFormat(tiny_tokenizer)
        limits = AttemptLimits(SamplingParams(100, stop_token_ids=chat.stop_token_ids))
        return ChatSession(policy, chat, [add], limits, "Be brief."), policy

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
    assert policy.opened == policy.closed
    assert ask(chat, "Again?")[0] == "answered"
    chat.reset()
    assert [message.text for message in chat.messages] == ["Be brief."]
    assert policy.opened == policy.closed


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
