"""Several agents in one program: what is trained, whose reward it is, and where frozen agents are."""

import os
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from program_groups import collect
from tests.support.judge_server import stub_model

from palestra import EvalSuite, command_agent, measure, train_grpo
from palestra.agents.programs import Endpoint, function_agent
from palestra.core.codec import decode, encode
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.files import read_jsonl
from palestra.core.types import Group
from palestra.envs.suite_env import SuiteEnvironment
from palestra.servers.openai.inference import load_completer
from palestra.sources.programs.runner import Roles
from palestra.train.batch import group_advantages, to_batch
from palestra.train.credit import with_role_advantages

CONFIG = RunConfig.build({"rollout.temperature": 1.0, "rollout.max_new_tokens": 40, "rollout.group_size": 4})
SUITE = EvalSuite.from_records([{"input": f"Question {i}"} for i in range(4)])


async def chat(endpoint: Endpoint, text: str) -> str:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}, timeout=60) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 1.0}
        answer = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


async def debate(case, base_url, api_key, agents):
    """The solver answers, the critic answers that, and the solver answers the critic."""
    solver = Endpoint(base_url, api_key)
    answer = await chat(solver, case["input"])
    critique = await chat(agents["critic"], f"Criticise: {answer}")
    return {"critique": critique, "final": await chat(solver, f"Answer to: {critique}")}


def collected(model, roles, measures, program=debate, load=load_completer, **options):
    agent = function_agent(program)
    environment = SuiteEnvironment(agent, SUITE, None, measures)
    return collect(model, environment, agent, CONFIG, cases=2, roles=Roles(roles, load), **options)


def batch_of(groups):
    groups = with_role_advantages(groups, CONFIG.train, {})
    return groups, to_batch(groups, group_advantages(groups, CONFIG.train, {}), mask_truncated=False)


@measure
def varied(ctx):
    return (sum(map(len, (m.text for m in ctx.messages))) % 7) / 7


@pytest.mark.parametrize("with_workers", [False, True])
def test_only_the_trained_agents_tokens_carry_gradient(model, with_workers, request):
    workers = request.getfixturevalue("gateway_workers") if with_workers else None
    frozen = load_completer("palestra/tiny")
    critics = []
    sample = frozen.policy.sample

    async def watched(session, params):
        turn = await sample(session, params)
        critics.append(turn.token_ids.tolist())
        return turn

    frozen.policy.sample = watched
    groups = collected(model, {"critic": "palestra/tiny"}, [varied], load=lambda name: frozen, workers=workers)
    rollouts = [r for group in groups for r in group.rollouts]
    assert all(r.error is None for r in rollouts)
    assert len(critics) == 8  # one turn in each attempt, and none of them is in a rollout
    sampled = [t.token_ids.tolist() for r in rollouts for t in r.all_turns if t.maker == "model"]
    assert len(sampled) == 16
    _, batch = batch_of(groups)
    assert batch.policy_mask.sum() == sum(map(len, sampled))
    trained = batch.token_ids[batch.policy_mask].tolist()
    assert sorted(trained) == sorted(token for turn in sampled for token in turn)
    assert {c.role for r in rollouts for c in r.conversations} == {""}
    assert all(r.info["frozen_agents"]["critic"][0]["content"].startswith("Criticise:") for r in rollouts)


def test_two_trained_agents_have_the_advantages_of_their_own_rewards(model):
    @measure
    def by_role(ctx):
        """The critic's reward is the opposite of the solver's, and its conversation is in the context."""
        assert ctx.agents["critic"][0].text.startswith("Criticise:")
        won = len(ctx.messages[-1].text) % 2
        return {"main": won, "critic": 1 - won}

    groups, batch = batch_of(collected(model, {"critic": "train"}, [by_role]))
    for group in groups:
        assert {c.role for r in group.rollouts for c in r.conversations} == {"", "critic"}
        assert set(group.rewards) <= {0.0, 1.0}
        for rollout in group.rollouts:
            assert rollout.reward == rollout.scores["by_role"].roles["main"]
            (critic,) = [c for c in rollout.lineages if c.role == "critic"]
            assert np.allclose(critic.advantages, -rollout.advantages[0])
        means = {
            role: np.mean([r.scores["by_role"].roles[role] for r in group.rollouts]) for role in ("main", "critic")
        }
        assert group.metrics["reward/critic"] == pytest.approx(means["critic"])
        assert group.metrics["reward/main"] == pytest.approx(means["main"])
    assert batch.policy_mask.sum() == sum(r.sampled_tokens for g in groups for r in g.rollouts)
    again = decode(encode(groups[0]), Group)
    assert [x.role for x in again.rollouts[0].lineages] == [x.role for x in groups[0].rollouts[0].lineages]
    assert again.rollouts[0].scores["by_role"].roles == groups[0].rollouts[0].scores["by_role"].roles


def test_a_verdict_for_an_unknown_role_is_no_verdict(model):
    groups = collected(model, {"critic": "train"}, [lambda ctx: {"main": 1, "critik": 0}])
    assert all("critik" in r.error for group in groups for r in group.rollouts)


def test_a_program_may_speak_with_labelled_agents_alone(model):
    async def only_critic(case, base_url, api_key, agents):
        return await chat(agents["critic"], case["input"])

    groups = collected(model, {"critic": "train"}, [varied], program=only_critic)
    assert {r.role for group in groups for r in group.rollouts} == {"critic"}
    assert all(r.error is None and r.sampled_tokens for group in groups for r in group.rollouts)


def test_an_agent_elsewhere_gets_its_key_and_model_and_the_program_does_not_see_them(model, monkeypatch):
    monkeypatch.setenv("PALESTRA_ROLE_KEY_CRITIC", "sk-upstream-secret")
    seen = []

    async def program(case, base_url, api_key, agents):
        seen.append(agents["critic"])
        return await debate(case, base_url, api_key, agents)

    with stub_model(lambda question: "Try again.") as stub:
        groups = collected(model, {"critic": f"{stub.base_url}#big-model"}, [varied], program=program)
    assert {body["model"] for body in stub.bodies} == {"big-model"}
    assert all(r.error is None for group in groups for r in group.rollouts)
    assert any("Try again." in m.text for m in groups[0].rollouts[0].messages)
    assert all(stub.base_url not in e.base_url and "upstream" not in e.api_key for e in seen)


PROGRAM = """
import json, os, sys, urllib.request

def chat(label, text):
    url, key = os.environ["OPENAI_BASE_URL" + label], os.environ["OPENAI_API_KEY" + label]
    body = json.dumps({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

print(chat("_CRITIC", "Criticise: " + chat("", json.load(sys.stdin)["input"])))
"""


def test_a_command_trains_with_a_frozen_critic_by_its_variables(tmp_path: Path):
    (tmp_path / "two.py").write_text(PROGRAM)
    agent = command_agent([sys.executable, str(tmp_path / "two.py")])
    config = {"agent.roles": {"critic": "start"}, "train.max_steps": 1, "train.problems_per_step": 1, "eval.cases": 1}
    config |= {"rollout.group_size": 2, "rollout.max_new_tokens": 20, "output_dir": str(tmp_path / "runs")}
    result = train_grpo(agent, SUITE, [varied], config=config, progress=False)
    rows = list(read_jsonl(result.run.rollouts_file))
    assert rows
    assert all(row["error"] is None for row in rows)
    assert all(row["messages"][0]["text"].startswith("Question") for row in rows)
    assert all("critic" in row["info"]["frozen_agents"] for row in rows)
    assert "OPENAI_BASE_URL_CRITIC" not in os.environ


@pytest.mark.parametrize("roles", [{"main": "train"}, {"a b": "train"}, {"a": " "}, {"a": "train", "A": "start"}])
def test_labels_that_cannot_be_variables_are_rejected(roles):
    with pytest.raises(SettingError, match=r"agent\.roles"):
        RunConfig.build({"agent.roles": roles})


def test_the_newest_checkpoint_of_the_run_is_the_opponent(tmp_path: Path):
    names: list[str] = []
    roles = Roles({"rival": "checkpoint"}, lambda name: names.append(name) or object(), lambda: newest)
    newest = None
    roles.load_models()
    roles.load_models()
    newest = tmp_path / "step-000002"
    roles.load_models()
    assert names == ["start", str(newest)]


def test_a_run_trains_against_its_own_checkpoints(tmp_path: Path):
    async def play(case, base_url, api_key, agents):
        return await chat(agents["rival"], await chat(Endpoint(base_url, api_key), case["input"]) or "?")

    config = {"agent.roles": {"rival": "checkpoint"}, "train.max_steps": 2, "checkpoint.every": 1, "eval.cases": 1}
    config |= {"rollout.group_size": 2, "rollout.max_new_tokens": 20, "train.problems_per_step": 1}
    result = train_grpo(play, SUITE, [varied], config=config | {"output_dir": str(tmp_path)}, progress=False)
    rows = list(read_jsonl(result.run.rollouts_file))
    assert {row["step"] for row in rows} == {1, 2}
    assert all(row["error"] is None and "rival" in row["info"]["frozen_agents"] for row in rows)
    with pytest.raises(SettingError, match=r"checkpoint\.every"):
        train_grpo(play, SUITE, [varied], config=config | {"checkpoint.every": 0, "output_dir": str(tmp_path / "b")})
