"""Programs as agents at a real gateway over the embedded model: groups, scores, rows and metrics."""

import asyncio
import json
import os
import signal
from itertools import chain

import httpx
import pytest
from program_groups import collect

from palestra import EvalSuite, demo
from palestra.agents.programs import function_agent
from palestra.agents.tools.run import run_calls
from palestra.agents.tools.tool import tools_by_name
from palestra.core.config import RunConfig
from palestra.core.types import Message, Problem, ToolCall
from palestra.envs.suite_env import SuiteEnvironment
from palestra.rollout.rewards import RewardFunctions
from palestra.servers.gateway.workers import GatewayWorkers
from palestra.sources.programs.outside import OutsideAgent
from palestra.sources.programs.runner import case_of, hidden_columns
from palestra.train.tasks import agent_collector

CONFIG = RunConfig.build({"rollout.temperature": 1.0, "rollout.max_new_tokens": 120, "rollout.group_size": 2})
TOOLS = tools_by_name(demo.agent.tools)
SCHEMAS = [tool.schema for tool in demo.agent.tools]


async def shop_assistant(case, base_url, api_key):
    """The demo's agent as a loop of its own, by plain HTTP."""
    messages = [{"role": "system", "content": demo.agent.instructions}, {"role": "user", "content": case["input"]}]
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as client:
        for _ in range(6):
            body = {"model": "any", "messages": messages, "tools": SCHEMAS}
            answer = await client.post("/chat/completions", json=body, timeout=60)
            answer.raise_for_status()
            reply = answer.json()["choices"][0]["message"]
            messages.append(reply)
            for call in reply.get("tool_calls") or ():
                asked = ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                (result,) = await run_calls(TOOLS, [asked], 10.0)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
            if not reply.get("tool_calls"):
                return reply["content"]


async def ask(case, base_url, api_key, role=None, max_tokens=2):
    """One request of an agent, with the case as the question."""
    messages = [{"role": "system", "content": role}] * bool(role) + [{"role": "user", "content": case["input"]}]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:
        body = {"model": "m", "messages": messages, "max_tokens": max_tokens}
        (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()


def collected(model, program, cases=1, suite=demo.suite, measures=None, rewards=(), **options):
    """The groups of a program; those of one case without the list around it."""
    needs_measures = not (program.posts_reward or rewards)
    environment = SuiteEnvironment(demo.agent, suite, None, measures, measures_required=needs_measures)
    groups = collect(model, environment, program, CONFIG, cases=cases, rewards=RewardFunctions(rewards), **options)
    return groups if cases > 1 else groups[0]


async def post_reward(client, taken, key=None, **body):
    headers = {"Authorization": f"Bearer {key or taken['api_key']}"}
    return (await client.post(f"/attempts/{taken['id']}/reward", headers=headers, **body)).status_code


def tokens(rollout, maker=None):
    return [turn.token_ids.tolist() for turn in rollout.turns if maker in (None, turn.maker)]


@pytest.mark.parametrize("with_workers", [False, True])
def test_a_program_gives_the_very_rollouts_of_our_own_loop(model, with_workers, request):
    workers = request.getfixturevalue("gateway_workers") if with_workers else None
    environment = SuiteEnvironment(demo.agent, demo.suite)
    collector = agent_collector(environment, model.policy, model.chat, CONFIG, training=True)
    native = asyncio.run(collector.collect(environment.problems("train")[:4], 2, [f"0/{i}" for i in range(4)]))
    groups = collected(model, function_agent(shop_assistant), cases=4, workers=workers)
    mine, other = ([rollout for group in found for rollout in group.rollouts] for found in (groups, native))
    same = [tokens(a, "model") == tokens(b, "model") for a, b in zip(mine, other, strict=True)]
    assert sum(same) >= 7  # a malformed call is told to the model by our loop; a client sees it as text
    for a, b in zip(mine, other, strict=True):
        if not any(call.error for message in b.messages for call in message.tool_calls):
            assert [*chain(*tokens(a))] == [*chain(*tokens(b))]
            assert a.reward == b.reward
    assert all(group.metrics["agent/rows_per_attempt"] == 1.0 for group in groups)
    assert all(group.metrics["agent/retokenised_turns"] == 0.0 for group in groups)


def test_each_conversation_of_a_subagent_is_a_row_and_the_answer_is_that_of_the_last(model):
    async def with_helper(case, base_url, api_key):
        for role in ("helper", "manager"):
            await ask(case, base_url, api_key, role)

    group = collected(model, function_agent(with_helper))
    assert group.metrics["agent/rows_per_attempt"] == 2.0
    for rollout in group.rollouts:
        assert rollout.messages[0].text == "manager"
        assert [lineage.messages[0].text for lineage in rollout.lineages] == ["helper"]
        assert len(rollout.conversations) == 2


def test_measures_see_what_the_program_returned_and_how_it_ended(model):
    async def says(case, base_url, api_key):
        await ask(case, base_url, api_key)
        return {"answer": case["input"]}

    def right(ctx):
        return ctx.program.result == {"answer": ctx.case.input} and ctx.program.exit_code == 0

    group = collected(model, function_agent(says), measures=[right])
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]


def test_a_program_that_gives_up_after_the_model_spoke_is_scored_and_its_words_are_kept(model):
    async def gives_up(case, base_url, api_key):
        await ask(case, base_url, api_key)
        raise RuntimeError("what the model said is no JSON")

    group = collected(model, function_agent(gives_up))
    for rollout in group.rollouts:
        assert rollout.error is None
        assert rollout.reward == 0.0
        assert "no JSON" in rollout.info["stderr"]


def test_an_agent_elsewhere_takes_cases_and_posts_rewards(model):
    seen = {}

    async def worker(gateway):
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            for number in range(4):
                taken = (await client.post("/attempts")).json()
                seen[taken["id"]] = taken
                if number == 0:  # takes a case, posts without asking the model
                    assert await post_reward(client, taken, json={"reward": 1}) == 200
                    continue
                other = next(iter(seen.values()))["api_key"]
                assert await post_reward(client, taken, other, json={"reward": 1}) == 401
                await ask(taken["case"], taken["base_url"], taken["api_key"])
                assert await post_reward(client, taken, content="{nonsense") == 400
                await post_reward(client, taken, json={"reward": number / 4})

    groups = collected(model, OutsideAgent("elsewhere", "palestra/tiny"), 2, measures=(), during=worker)
    rewards = sorted(r.reward for group in groups for r in group.rollouts)
    assert rewards == [0.0, 0.25, 0.5, 0.75]
    silent = [r for group in groups for r in group.rollouts if r.error]
    assert len(silent) == 1
    assert "without asking the model" in silent[0].error


def test_a_case_that_was_taken_and_never_rewarded_fails_after_its_time(model):
    async def forgetful(gateway):
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            for _ in range(2):
                await client.post("/attempts")

    outside = OutsideAgent("elsewhere", "palestra/tiny")
    group = collected(model, outside, measures=(), during=forgetful, timeout_s=0.2)
    assert all("longer than 0.2 s" in rollout.error for rollout in group.rollouts)


@pytest.mark.parametrize("moment", ["before the first request", "between two requests", "after the last request"])
@pytest.mark.parametrize("others", [1, 0])
def test_attempts_of_a_gateway_worker_that_is_killed_are_made_again_with_the_same_seeds(model, moment, others):
    async def ask_twice(case, base_url, api_key):
        await ask(case, base_url, api_key)
        await ask(case, base_url, api_key, "again")

    def killing(workers):
        killed = []

        def kill(now, base_url):
            if now == moment and not killed:
                [worker] = [worker for worker in workers._workers if base_url.startswith(worker.url)]
                killed.append(worker.process.pid)
                os.kill(killed[0], signal.SIGKILL)

        async def run(case, base_url, api_key):
            kill("before the first request", base_url)
            await ask(case, base_url, api_key)
            kill("between two requests", base_url)
            await ask(case, base_url, api_key, "again")
            kill("after the last request", base_url)

        return run

    expected = collected(model, function_agent(ask_twice), cases=3)
    workers = GatewayWorkers(1 + others, "127.0.0.1")
    groups = collected(model, function_agent(killing(workers)), cases=3, workers=workers)
    assert sum(worker.lost is not None for worker in workers._workers) == 1
    for group, same in zip(groups, expected, strict=True):
        assert [rollout.error for rollout in group.rollouts] == [None] * 2
        assert [tokens(rollout) for rollout in group.rollouts] == [tokens(rollout) for rollout in same.rollouts]
        assert group.metrics["agent/requests_per_attempt"] == 2.0


def test_an_attempt_that_loses_two_gateway_workers_fails_with_the_cause(model):
    workers = GatewayWorkers(2, "127.0.0.1")

    async def kill_and_ask(case, base_url, api_key):
        for worker in workers._workers:
            if base_url.startswith(worker.url) and worker.lost is None:
                os.kill(worker.process.pid, signal.SIGKILL)
        await ask(case, base_url, api_key)

    group = collected(model, function_agent(kill_and_ask), workers=workers)
    assert [rollout.stop for rollout in group.rollouts] == ["failed"] * 2
    assert all("was ended by SIGKILL" in rollout.error for rollout in group.rollouts)


def test_a_case_tells_nothing_of_what_is_expected():
    suite = EvalSuite.from_records([{"q": "2 + 2?", "total": 4, "hint": "add"}], lambda r: r["q"], lambda r: r["total"])
    hidden = hidden_columns(suite.cases)
    assert case_of(suite.cases[0], hidden) == {"id": "suite-0", "input": "2 + 2?", "q": "2 + 2?", "hint": "add"}
    plain = EvalSuite.from_records([{"input": "2 + 2?", "expect": "4"}])
    assert case_of(plain.cases[0]) == {"id": "suite-0", "input": "2 + 2?"}
    said = Problem("p", (Message("user", "hi"),))
    assert case_of(said)["input"] == [{"role": "user", "content": "hi"}]


def test_a_context_that_cannot_be_made_fails_its_attempts_and_reward_functions_may_stand_alone(model):
    def broken(record):
        raise KeyError("no database")

    suite = EvalSuite(demo.suite.cases[:1], demo.suite.measures, context_fn=broken)
    group = collected(model, function_agent(shop_assistant), suite=suite)
    assert all("no database" in rollout.error for rollout in group.rollouts)
    bare = EvalSuite(demo.suite.cases[:1])
    group = collected(model, function_agent(shop_assistant), suite=bare, rewards=[lambda completions: [0.5] * 2])
    assert [rollout.reward for rollout in group.rollouts] == [0.5, 0.5]


def test_a_column_that_happens_to_equal_the_answer_is_kept():
    records = [{"input": "1 + 2?", "level": 3, "expect": 3}, {"input": "1 + 1?", "level": 1, "expect": 2}]
    suite = EvalSuite.from_records(records)
    hidden = hidden_columns(suite.cases)
    assert [case_of(case, hidden)["level"] for case in suite.cases] == [3, 1]
    assert all("expect" not in case_of(case, hidden) for case in suite.cases)
    computed = EvalSuite.from_records(
        [{"input": "1 + 2?", "level": 3, "sum": 3}, {"input": "1 + 1?", "level": 1, "sum": 2}],
        expect_fn=lambda record: record["sum"],
    )
    assert hidden_columns(computed.cases) == {"expect", "sum"}


def test_a_posted_error_fails_the_attempt(model):
    async def agent(gateway):
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            for body in ({"error": "db down"}, {"reward": 0.5}):
                taken = (await client.post("/attempts")).json()
                await ask(taken["case"], taken["base_url"], taken["api_key"])
                await post_reward(client, taken, json=body)

    group = collected(model, OutsideAgent("elsewhere", "palestra/tiny"), during=agent)
    errors = [rollout.error for rollout in group.rollouts]
    assert sorted(error is None for error in errors) == [False, True]
    assert any(error and "db down" in error for error in errors)
