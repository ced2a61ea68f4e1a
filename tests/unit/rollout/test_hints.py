"""Hints: what is added to a prompt and taken out again, and which solutions are worth imitating."""

import asyncio
from typing import Any

import pytest
from builders import rollout
from scripted import ANSWER, CALL, ScriptedEnvironment, ScriptedEpisode, ScriptedPolicy

from palestra.core.types import Message, Problem, Rollout, SamplingParams, ToolCall, ToolResult
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits, token_speakers
from palestra.rollout.collect import AgentLoop, Collector
from palestra.rollout.hints import Hint, HintedEnvironment, quality, rules_for

PROBLEM = Problem("good", "What is 2 + 3?", 5)
EXAMPLE = (Message("user", "What is 1 + 1?"), Message("assistant", "2"))


def solved(*steps: tuple[dict[str, Any], str] | str, question: str = "What is 2 + 3?", **fields: Any) -> Rollout:
    """A passed attempt: calls of `add` with their results, then an answer."""
    messages, results = [Message("user", question)], []
    for step in steps:
        if isinstance(step, str):
            messages.append(Message("assistant", step))
            continue
        call = ToolCall("c", "add", step[0])
        messages += [Message("assistant", "", tool_calls=(call,)), Message("tool", step[1], tool_call_id="c")]
        results.append(ToolResult(call, step[1], ok=not step[1].startswith("Error")))
    fields = {"tool_names": ("add",), "tool_results": tuple(results)} | fields
    return rollout(1.0, messages=tuple(messages), turns=(), **fields)


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (solved(({"a": 2, "b": 3}, "5"), "It is 5."), 0),
        (solved(({"a": 2, "b": 3}, "5"), ({"a": 5, "b": 2}, "7"), "7"), 0),
        (solved(({"a": 2.0, "b": 3.0}, "1,005"), "It is 1005."), 0),
        (solved(({"a": 2, "b": 3}, "5"), "Twice 5 is 10."), 1),
        (solved(({"a": 4, "b": 1}, "5"), "It is 5."), 2),
        (solved(({"expression": "4 + 1"}, "5"), "It is 5."), 2),
        (solved("It is 5."), 3),
        (solved(({"a": 2, "b": 3}, "Error: no"), "It is 5."), 3),
        (solved("It is 5.", tool_names=()), 0),
    ],
)
def test_a_solution_is_worth_imitating_if_its_numbers_come_from_somewhere(attempt: Rollout, expected: int) -> None:
    assert quality(attempt) == expected


def test_rules_name_the_mistakes_that_attempts_have_in_common() -> None:
    repeats = solved(({"a": 2, "b": 3}, "5"), ({"a": 2, "b": 3}, "5"), stop="tool_limit")
    guesses = solved(({"a": 8, "b": 9}, "17"), "17")
    silent = solved("It is 5.")
    good = solved(({"a": 2, "b": 3}, "5"), "5")
    assert rules_for([good]) == ()
    for word in ("repeat", "answer in words"):
        assert word in " ".join(rules_for([repeats]))
    assert "make up" in " ".join(rules_for([guesses]))
    assert "Call a tool" in " ".join(rules_for([silent]))
    assert rules_for([repeats, *[good] * 10]) == (), "one of many is not common"


def test_a_hint_stands_before_the_question_and_behind_the_instructions() -> None:
    prompt = [Message("system", "Be exact."), Message("user", "What is 2 + 3?")]
    hinted = Hint(("Be brief.",), (EXAMPLE,), tells_answer=True).apply(prompt, PROBLEM)
    assert [m.role for m in hinted] == ["system", "user", "assistant", "user"]
    assert hinted[0].text.startswith("Be exact.\n\nBe brief. The right result is: 5.")
    assert hinted[-1] == prompt[-1]
    assert prompt[0].text == "Be exact."
    alone = Hint(("Be brief.",)).apply(prompt[1:], PROBLEM)
    assert [m.text for m in alone] == ["Be brief.\n\nWhat is 2 + 3?"]


def test_hinted_attempts_are_scored_and_learned_without_the_hint(tiny_tokenizer: Any) -> None:
    chat, environment = ChatFormat(tiny_tokenizer), ScriptedEnvironment()
    hinted = HintedEnvironment(environment, {PROBLEM.id: Hint(("Be brief.",), (EXAMPLE,))})
    policy = ScriptedPolicy(tiny_tokenizer, [CALL, ANSWER], context=700)
    limits = AttemptLimits(SamplingParams(400, stop_token_ids=chat.stop_token_ids))
    other = Problem("other", "What is 3 + 2?", 5)
    groups = asyncio.run(
        Collector(hinted, AgentLoop(limits, token_speakers(policy, chat))).collect([PROBLEM, other], 1, ["a", "b"])
    )
    (raw,), (untouched,) = (group.rollouts for group in groups)
    plain = hinted.without_hint(raw, chat)
    assert "Be brief." in chat.tokenizer.decode(raw.turns[0].token_ids)
    opening = environment.open(PROBLEM)
    assert plain.turns[0] == chat.prompt(opening.prompt, [tool.schema for tool in opening.tools])
    assert plain.turns[1:] == raw.turns[1:], "the sampled tokens stay as they are"
    assert plain.messages[: len(opening.prompt)] == tuple(opening.prompt)
    assert len(plain.messages) == len(untouched.messages)
    assert plain.passed
    assert plain.scores == untouched.scores


def test_measures_do_not_see_the_hint() -> None:
    seen: list[Any] = []

    class Episode(ScriptedEpisode):
        async def score(self, messages: Any, tool_results: Any) -> Any:
            seen.extend(messages)
            return {}

    environment = ScriptedEnvironment()
    environment.open = lambda problem: Episode((Message("user", problem.input),))  # type: ignore[method-assign,assignment]
    episode = HintedEnvironment(environment, {PROBLEM.id: Hint(("Be brief.",), (EXAMPLE,))}).open(PROBLEM)
    said = [*episode.prompt, Message("assistant", "5")]
    asyncio.run(episode.score(said, ()))
    assert [message.text for message in seen] == ["What is 2 + 3?", "5"]
