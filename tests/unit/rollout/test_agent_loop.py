"""The agent loop, with a policy whose turns the test has written."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from scripted import ANSWER, CALL, ScriptedEpisode, ScriptedPolicy, ScriptedSession, add

from palestra import function_tool
from palestra.core.types import Message, Problem, Rollout, SamplingParams, Turn
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits, run_attempt
from palestra.rollout.speakers import TokenSpeaker


@function_tool
def slow(a: int) -> int:
    """Wait.

    Args:
        a: Anything.
    """
    time.sleep(0.3)
    return a


def play(tokenizer, script: list[str], episode: ScriptedEpisode, budget: int = 400, **limits: Any) -> Rollout:
    chat = ChatFormat(tokenizer)
    policy = ScriptedPolicy(tokenizer, script)
    sampling = SamplingParams(budget, stop_token_ids=chat.stop_token_ids, seed=100)
    prompt = chat.prompt(episode.prompt, [t.schema for t in episode.tools])
    options = AttemptLimits(sampling, **limits)
    schemas, session = [t.schema for t in episode.tools], policy.open(prompt.token_ids.tolist())
    speaker = TokenSpeaker(policy, session, chat, prompt, schemas, options.unexpected_call_format)
    rollout = asyncio.run(run_attempt(speaker, episode, Problem("p", "q"), options))
    assert policy.closed == 1
    assert not episode.closed, "reward functions may look at it before the collector closes it"
    seeds = [params.seed for params in policy.params]
    assert seeds == list(range(100, 100 + len(seeds))), "no two turns share their noise"
    return rollout


def test_a_tool_call_is_answered_and_the_conversation_goes_on(tiny_tokenizer) -> None:
    rollout = play(tiny_tokenizer, [CALL, ANSWER], ScriptedEpisode(tools=[add]))
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert rollout.messages[3].text == "5"
    assert rollout.stop == "answered"
    assert rollout.passed
    assert {v for t in rollout.turns for v in t.versions.tolist()} == {3}


def test_calls_of_all_turns_have_ids_of_their_own_and_results_keep_theirs(tiny_tokenizer) -> None:
    failing = CALL.replace('"b": 3', '"b": "three"')
    rollout = play(tiny_tokenizer, [CALL, failing, CALL, ANSWER], ScriptedEpisode(tools=[add]))
    ids = [call.id for message in rollout.messages for call in message.tool_calls]
    assert ids == ["call_0", "call_1", "call_2"]
    assert [m.tool_call_id for m in rollout.messages if m.role == "tool"] == ids
    assert [result.call.id for result in rollout.tool_results] == ids
    assert [result.ok for result in rollout.tool_results] == [True, False, True]


def test_ids_that_the_template_shows_stay_as_the_model_read_them(tiny_tokenizer) -> None:
    template = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = template + "{#- tool_call_id -#}"
    try:
        rollout = play(tiny_tokenizer, [CALL, CALL, ANSWER], ScriptedEpisode(tools=[add]))
    finally:
        tiny_tokenizer.chat_template = template
    assert [call.id for message in rollout.messages for call in message.tool_calls] == ["call_0", "call_0"]


FENCED = 'Let me add.\n```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```<|im_end|>'


def test_a_call_in_an_unexpected_format_is_executed_and_counted(tiny_tokenizer) -> None:
    rollout = play(tiny_tokenizer, [FENCED, ANSWER], ScriptedEpisode(tools=[add]))
    assert (rollout.messages[2].text, rollout.messages[3].text) == ("Let me add.", "5")
    assert [result.call.format for result in rollout.tool_results] == ["json"]
    assert rollout.passed


def test_a_call_in_an_unexpected_format_can_be_answered_with_the_expected_one(tiny_tokenizer) -> None:
    episode = ScriptedEpisode(tools=[add])
    rollout = play(tiny_tokenizer, [FENCED, CALL, ANSWER], episode, unexpected_call_format="error")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in rollout.messages[3].text
    assert [result.ok for result in rollout.tool_results] == [False, True]
    assert rollout.passed


def test_the_record_is_what_the_template_renders_in_one_go(tiny_tokenizer) -> None:
    rollout = play(tiny_tokenizer, [CALL, ANSWER], ScriptedEpisode(tools=[add]))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    conversation = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    whole = tiny_tokenizer.apply_chat_template(conversation, tools=[add.schema], tokenize=False)
    spoken = tiny_tokenizer.decode([i for t in rollout.turns for i in t.token_ids])
    assert whole.rstrip() == spoken.rstrip()


def test_only_the_body_of_a_tool_result_is_the_environments(tiny_tokenizer) -> None:
    rollout = play(tiny_tokenizer, [CALL, ANSWER], ScriptedEpisode(tools=[add]))
    assert [tiny_tokenizer.decode(t.token_ids) for t in rollout.turns if t.maker == "environment"] == ["5"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ('<tool_call>\n{"name": "add", "arguments": \n</tool_call><|im_end|>', "Error"),
        ('<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call><|im_end|>', "no tool 'sub'"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>', "b"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": "x", "b": 1}}\n</tool_call><|im_end|>', "a"),
    ],
)
def test_a_bad_call_gets_an_error_that_the_model_can_read(tiny_tokenizer, call: str, reason: str) -> None:
    rollout = play(tiny_tokenizer, [call, ANSWER], ScriptedEpisode(tools=[add]))
    assert rollout.stop == "answered"
    assert not rollout.tool_results[0].ok
    assert rollout.messages[3].text.startswith("Error:")
    assert reason in rollout.messages[3].text


def test_the_token_budget_counts_all_turns(tiny_tokenizer) -> None:
    used = len(tiny_tokenizer.encode(CALL, add_special_tokens=False))
    rollout = play(tiny_tokenizer, [CALL, ANSWER], ScriptedEpisode(tools=[add]), budget=used + 2)
    assert rollout.stop == "truncated"
    assert rollout.sampled_tokens == used + 2


def test_a_full_context_is_told_from_a_budget_that_is_used_up(tiny_tokenizer, monkeypatch) -> None:
    sample = ScriptedPolicy.sample

    async def ends_for_want_of_room(policy, session, params) -> Turn:
        return replace(await sample(policy, session, params), finish="length")

    monkeypatch.setattr(ScriptedPolicy, "sample", ends_for_want_of_room)
    rollout = play(tiny_tokenizer, [CALL], ScriptedEpisode(tools=[add]))
    assert (rollout.stop, rollout.cut_off, rollout.tool_names) == ("context_full", True, ("add",))


def test_tool_rounds_are_limited(tiny_tokenizer) -> None:
    rollout = play(tiny_tokenizer, [CALL] * 5, ScriptedEpisode(tools=[add]), max_tool_rounds=2)
    assert rollout.stop == "tool_limit"
    assert len(rollout.tool_results) == 2


def test_a_tool_that_takes_too_long_is_answered_with_an_error(tiny_tokenizer) -> None:
    call = '<tool_call>\n{"name": "slow", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    rollout = play(tiny_tokenizer, [call, ANSWER], ScriptedEpisode(tools=[slow]), tool_timeout_s=0.05)
    assert "longer than" in rollout.tool_results[0].content


def test_an_environment_may_reply(tiny_tokenizer) -> None:
    episode = ScriptedEpisode(replies=[[Message("user", "Are you sure?")]])
    rollout = play(tiny_tokenizer, ["It is 4.<|im_end|>", ANSWER], episode)
    assert [m.text for m in rollout.messages[-3:]] == ["It is 4.", "Are you sure?", "It is 5."]
    assert [tiny_tokenizer.decode(t.token_ids) for t in rollout.turns if t.maker == "environment"] == ["Are you sure?"]


def test_a_broken_environment_is_recorded_and_not_raised(tiny_tokenizer) -> None:
    rollout = play(tiny_tokenizer, [ANSWER], ScriptedEpisode(broken=True))
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
        asyncio.run(speaker.say(SamplingParams(4)))
