"""A teacher's attempts: what passes is kept and saved, the rest is counted."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import add, agent
from served import json_app, served
from starlette.responses import JSONResponse

from palestra import EvalSuite, measure
from palestra.core.conversations import Conversation, read_conversations
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.core.types import SamplingParams
from palestra.envs.suite_env import SuiteEnvironment
from palestra.models.chat.template import ChatFormat
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.rollout.agent_loop import AttemptLimits
from palestra.train.demonstrations import demonstrations
from palestra.train.teacher import TeacherCost, teacher_demonstrations


class Teacher:
    """Adds with the tool. "easy" is right immediately, "hard" at the third attempt, "never" never is."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.reports_usage, self.status, self.url = True, 200, ""

    async def respond(self, request: Any) -> JSONResponse:
        messages = (await request.json())["messages"]
        word = next(m["content"] for m in messages if m["role"] == "user").split()[0]
        if messages[-1]["role"] == "tool":
            right = {"easy": True, "hard": self.asked[word] >= 3, "never": False}[word]
            message = {"content": f"It is {messages[-1]['content'] if right else 'unknown'}."}
        else:
            self.asked[word] += 1
            call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            message = {"content": None, "tool_calls": [call], "reasoning_content": f"Attempt {self.asked[word]}."}
        usage = {"usage": {"prompt_tokens": 10, "completion_tokens": 3}} if self.reports_usage else {}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}]} | usage, self.status)


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    made = Teacher()
    with served(json_app(made.respond)) as url:
        made.url = f"{url}/v1"
        yield made


@measure
def says_5(ctx: Any) -> bool:
    return "5" in ctx.messages[-1].text


def taught(teacher: Any, *words: str, **options: Any) -> tuple[list[Conversation], TeacherCost]:
    suite = EvalSuite.from_records([{"input": f"{word} question: 2 + 3?"} for word in words], measures=[says_5])
    environment = SuiteEnvironment(agent(instructions="Use tools.", tools=[add]), suite)
    endpoint = OpenAIChat(OpenAISettings(model_name="m", base_url=teacher.url))
    limits = AttemptLimits(SamplingParams(100))
    return asyncio.run(teacher_demonstrations(environment, suite.cases, endpoint, limits, **options))


def test_only_attempts_that_pass_are_kept_and_cases_without_one_are_tried_again(teacher):
    found, cost = taught(teacher, "easy", "hard", "never", attempts=4)
    assert [c.messages[1].text.split()[0] for c in found] == ["easy", "hard"]
    assert teacher.asked == {"easy": 1, "hard": 3, "never": 4}
    assert [{i: m.reasoning for i, m in enumerate(c.messages) if m.reasoning} for c in found] == [
        {2: "Attempt 1."},
        {2: "Attempt 3."},
    ]
    assert (cost.attempts, cost.passes, cost.solved, cost.unsolved) == (8, 2, 2, 1)
    assert (cost.requests, cost.prompt_tokens, cost.completion_tokens, cost.unreported) == (16, 160, 48, 0)


def test_requests_without_usage_are_counted(teacher):
    teacher.reports_usage = False
    found, cost = taught(teacher, "easy")
    assert (len(found), cost.attempts, cost.passes) == (1, 1, 1)
    assert (cost.requests, cost.prompt_tokens, cost.completion_tokens, cost.unreported) == (2, 0, 0, 2)


def test_what_it_said_becomes_a_demonstration_with_the_agents_instructions_and_tools(teacher, tiny_tokenizer):
    found, _ = taught(teacher, "easy")
    chat = ChatFormat(tiny_tokenizer)
    (rollout,) = demonstrations(found, chat)
    assert [turn.maker for turn in rollout.turns if turn.maker == "model"] == ["model"] * 2
    prompt = tiny_tokenizer.decode(rollout.turns[0].token_ids)
    assert "Use tools." in prompt
    assert "Add two numbers." in prompt
    assert "It is 5." in tiny_tokenizer.decode(rollout.turns[-1].token_ids)


def test_saved_demonstrations_are_not_paid_for_again(teacher, tmp_path: Path):
    file = RunFolder(tmp_path).demonstrations_file
    first, _ = taught(teacher, "easy", "never", attempts=1, file=file)
    assert [c.messages for c in read_conversations(file)] == [c.messages for c in first]
    again, cost = taught(teacher, "easy", "never", attempts=1, file=file)
    assert [c.messages for c in again] == [c.messages for c in first]
    assert again[0].tools == first[0].tools
    assert [m.reasoning for m in again[0].messages] == [m.reasoning for m in first[0].messages]
    assert teacher.asked == {"easy": 1, "never": 2}
    assert (cost.from_file, cost.attempts) == (1, 1)


def test_an_endpoint_that_refuses_is_an_error(teacher):
    teacher.status = 401
    with pytest.raises(PalestraError, match=r"every attempt .*failed.*401"):
        taught(teacher, "easy", attempts=1)
