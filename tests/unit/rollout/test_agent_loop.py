"""The agent loop, with a policy whose turns the test has written."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from builders import END, call_text
from scripted import ANSWER, CALL, ScriptedEpisode, ScriptedPolicy, ScriptedSession, add, play

from palestra import function_tool
from palestra.core.messages import to_dict
from palestra.core.types import Message, Rollout, SamplingParams, Turn
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import TokenSpeaker


@function_tool
def slow(a: int) -> int:
    """Wait.

    Args:
        a: Anything.
    """
    time.sleep(0.3)
    return a


def played(tokenizer: Any, script: list[str], *arguments: Any, **limits: Any) -> Rollout:
    return play(tokenizer, script, *arguments, **limits)[0]


def decoded(tokenizer: Any, rollout: Rollout, *makers: str) -> list[str]:
    """The turns of these makers as text; of all, if none are named."""
    return [tokenizer.decode(t.token_ids) for t in rollout.turns if not makers or t.maker in makers]


def test_a_tool_call_is_answered_and_the_record_is_what_the_template_renders_in_one_go(tiny_tokenizer) -> None:
    rollout = played(tiny_tokenizer, [CALL, ANSWER])
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert rollout.messages[3].text == "5"
    assert rollout.stop == "answered"
    assert rollout.passed
    assert {v for t in rollout.turns for v in t.versions.tolist()} == {3}
    assert decoded(tiny_tokenizer, rollout, "environment") == ["5"], "only the body of a tool result"
    whole = tiny_tokenizer.apply_chat_template(
        [to_dict(message) for message in rollout.messages], tools=[add.schema], tokenize=False
    )
    assert whole.rstrip() == "".join(decoded(tiny_tokenizer, rollout)).rstrip()


def test_calls_of_all_turns_have_ids_of_their_own_and_results_keep_theirs(tiny_tokenizer) -> None:
    failing = CALL.replace('"b": 3', '"b": "three"')
    rollout = played(tiny_tokenizer, [CALL, failing, CALL, ANSWER])
    ids = [call.id for message in rollout.messages for call in message.tool_calls]
    assert ids == ["call_0", "call_1", "call_2"]
    assert [m.tool_call_id for m in rollout.messages if m.role == "tool"] == ids
    assert [result.call.id for result in rollout.tool_results] == ids
    assert [result.ok for result in rollout.tool_results] == [True, False, True]


def test_ids_that_the_template_shows_stay_as_the_model_read_them(tiny_tokenizer) -> None:
    tiny_tokenizer.chat_template += "{#- tool_call_id -#}"
    rollout = played(tiny_tokenizer, [CALL, CALL, ANSWER])
    assert [call.id for message in rollout.messages for call in message.tool_calls] == ["call_0", "call_0"]


FENCED = 'Let me add.\n```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```<|im_end|>'


def test_a_call_in_an_unexpected_format_is_executed_and_counted_or_answered_with_the_expected_one(tiny_tokenizer):
    rollout = played(tiny_tokenizer, [FENCED, ANSWER])
    assert (rollout.messages[2].text, rollout.messages[3].text) == ("Let me add.", "5")
    assert [result.call.format for result in rollout.tool_results] == ["json"]
    assert rollout.passed
    corrected = played(tiny_tokenizer, [FENCED, CALL, ANSWER], unexpected_call_format="error")
    assert CALL.removesuffix("<|im_end|>") in corrected.messages[3].text
    assert [result.ok for result in corrected.tool_results] == [False, True]
    assert corrected.passed


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_text("\n").replace("}\n</tool_call>", "</tool_call>"), "Error"),
        (call_text("{}", "sub"), "no tool 'sub'"),
        (call_text('{"a": 2}'), "b"),
        (call_text('{"a": "x", "b": 1}'), "a"),
    ],
)
def test_a_bad_call_gets_an_error_that_the_model_can_read(tiny_tokenizer, call: str, reason: str) -> None:
    rollout = played(tiny_tokenizer, [call + END, ANSWER])
    assert rollout.stop == "answered"
    assert not rollout.tool_results[0].ok
    assert rollout.messages[3].text.startswith("Error:")
    assert reason in rollout.messages[3].text


def test_the_token_budget_counts_all_turns(tiny_tokenizer) -> None:
    used = len(tiny_tokenizer.encode(CALL, add_special_tokens=False))
    rollout = played(tiny_tokenizer, [CALL, ANSWER], budget=used + 2)
    assert rollout.stop == "truncated"
    assert rollout.sampled_tokens == used + 2


def test_a_full_context_is_told_from_a_budget_that_is_used_up(tiny_tokenizer, monkeypatch) -> None:
    sample = ScriptedPolicy.sample

    async def ends_for_want_of_room(policy, session, params) -> Turn:
        return replace(await sample(policy, session, params), finish="length")

    monkeypatch.setattr(ScriptedPolicy, "sample", ends_for_want_of_room)
    rollout = played(tiny_tokenizer, [CALL])
    assert (rollout.stop, rollout.cut_off, rollout.tool_names) == ("context_full", True, ("add",))


def test_tool_rounds_and_the_time_of_a_tool_are_limited(tiny_tokenizer) -> None:
    rollout = played(tiny_tokenizer, [CALL] * 5, max_tool_rounds=2)
    assert rollout.stop == "tool_limit"
    assert len(rollout.tool_results) == 2
    script = [call_text('{"a": 2}', "slow") + END, ANSWER]
    late = played(tiny_tokenizer, script, ScriptedEpisode(tools=[slow]), tool_timeout_s=0.05)
    assert "longer than" in late.tool_results[0].content


def test_an_environment_may_reply(tiny_tokenizer) -> None:
    episode = ScriptedEpisode(replies=[[Message("user", "Are you sure?")]])
    rollout = played(tiny_tokenizer, ["It is 4.<|im_end|>", ANSWER], episode)
    assert [m.text for m in rollout.messages[-3:]] == ["It is 4.", "Are you sure?", "It is 5."]
    assert decoded(tiny_tokenizer, rollout, "environment") == ["Are you sure?"]


def test_a_broken_environment_is_recorded_and_not_raised(tiny_tokenizer) -> None:
    rollout = played(tiny_tokenizer, [ANSWER], ScriptedEpisode(broken=True))
    assert rollout.stop == "failed"
    assert rollout.error == "scoring raised ConnectionError: the scoring server is gone"


@pytest.mark.parametrize("held", [[1, 2, 9], [1, 2]], ids=["another token", "a token less"])
def test_a_session_that_holds_other_tokens_than_the_record_is_an_error(tiny_tokenizer, held: list[int]) -> None:
    policy = ScriptedPolicy(tiny_tokenizer, [])

    async def sample(session: ScriptedSession, params: SamplingParams) -> Turn:
        session.token_ids[:] = held
        return Turn("model", [3], [-0.1], finish="stop")

    policy.sample = sample  # type: ignore[method-assign]
    prompt = Turn("template", [1, 2])
    speaker = TokenSpeaker(policy, policy.open([1, 2]), ChatFormat(tiny_tokenizer), prompt)
    with pytest.raises(RuntimeError, match="between 2 and 3: tokens must be trained exactly as sampled"):
        asyncio.run(speaker.generate(SamplingParams(4)))
