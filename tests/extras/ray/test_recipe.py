"""A rollout actor builds itself from what was sent to it, and samples what one process would."""

import asyncio
import threading
from dataclasses import replace

import pytest

from palestra import Agent, EvalSuite, function_tool, measure
from palestra.core.codec import decode, encode
from palestra.core.config import RunConfig
from palestra.core.types import Group
from palestra.core.weights import Weights
from palestra.envs.suite_env import SuiteEnvironment
from palestra.extras.ray.backend import ActorRecipe
from palestra.extras.ray.pool import GroupJob, pack
from palestra.models.loading import load_model
from palestra.policy.local import LocalPolicy
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher

cloudpickle = pytest.importorskip("cloudpickle")  # Ray has its own copy of it


@function_tool
def look(name: str) -> str:
    """Looks a thing up.

    Args:
        name: of the thing
    """
    return f"{name}: here"


@measure
def short(ctx) -> bool:
    return len(ctx.answer) < 50


def environment() -> SuiteEnvironment:
    rows = [{"id": str(i), "input": f"What is {i} + 3?", "expect": i + 3} for i in range(2)]
    suite = EvalSuite.from_records(rows, measures=[short], context_fn=lambda record: threading.Lock())
    return SuiteEnvironment(Agent("a", "palestra/tiny", "Answer.", tools=[look]), suite)


def test_an_actor_built_from_a_pickle_samples_the_groups_of_one_process() -> None:
    settings = {
        "backend": "ray", "seed": 3, "rollout.group_size": 2, "rollout.max_new_tokens": 16, "rollout.max_staleness": 2,
        "model.kv_memory_gib": 0.05, "model.dtype": "float32",
    }  # fmt: skip
    config, task = RunConfig.build(settings), EnvironmentTask(environment())
    problem = task.environment.problems("train")[0]
    task.environment.open(problem)  # its context, a lock, stays behind
    sampler = cloudpickle.loads(cloudpickle.dumps(ActorRecipe(config, replace(task, trainer=None))))()
    loaded = load_model("palestra/tiny")
    weights = Weights(5, lambda: dict(loaded.model.named_parameters()))
    with asyncio.Runner() as runner:
        sampler.update(pack(weights))
        answer = runner.run(sampler.sample(encode(GroupJob(problem, 2, "3/0", training=True))))
        policy = LocalPolicy(loaded.model, loaded.tokenizer, kv_memory_gib=0.05, self_check=False)
        policy.update(replace(weights, module=loaded.model))
        parts = Parts(config, policy, loaded.tokenizer, runner, Watcher())
        [expected] = runner.run(
            ActorRecipe(config, task).sampler(parts).collectors[True].collect([problem], 2, ["3/0"])
        )
    group = decode(answer, Group)
    assert [[t.token_ids.tolist() for t in r.turns] for r in group.rollouts] == [
        [t.token_ids.tolist() for t in r.turns] for r in expected.rollouts
    ]
    assert {int(t.versions[0]) for r in group.rollouts for t in r.turns if t.maker == "model"} == {5}
