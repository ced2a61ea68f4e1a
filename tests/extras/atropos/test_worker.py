"""An environment's side of the wire: sampling over HTTP, and posting no more than the trainer has use for."""

import asyncio
from pathlib import Path

import httpx
import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, RolloutError, SettingError
from palestra.core.types import Group, Rollout, SamplingParams, Turn
from palestra.envs.discover import load_env
from palestra.extras.atropos.protocol import WireClient
from palestra.extras.atropos.runs import EnvironmentWorker
from palestra.extras.atropos.server import trajectory_app
from palestra.models.chat.template import ChatFormat
from palestra.policy.remote import RemotePolicy
from palestra.rollout.collect import Collector
from palestra.servers.openai.inference import inference_app
from palestra.train.tasks import agent_collector
from palestra.train.watcher import Watcher

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_first_env.py"
SHORT = SamplingParams(max_new_tokens=12, seed=5)


class Notes(Watcher):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def model_url(serve, model) -> str:
    return serve(inference_app(model))


@pytest.fixture
def api(serve, tmp_path) -> httpx.Client:
    return httpx.Client(base_url=serve(trajectory_app(tmp_path)), timeout=30)


def register_trainer(api: httpx.Client, **more: int) -> None:
    settings = {"batch_size": 4, "max_token_len": 512, "num_steps": 2} | more
    assert api.post("/register", json=settings).status_code == 200
    assert api.get("/batch").json() == {"batch": None}


def make_worker(api: httpx.Client, model, model_url: str, **settings) -> tuple[EnvironmentWorker, Notes]:
    env, notes = load_env(str(EXAMPLE), {}), Notes()
    settings = {"rollout.group_size": 2, "rollout.max_new_tokens": 16, "train.filter_equal_groups": False} | settings
    config = RunConfig.build(settings)

    async def make_collector() -> Collector:
        policy = RemotePolicy(model_url, give_up_s=0)
        return agent_collector(env, policy, ChatFormat(model.tokenizer), config, training=True)

    wire = WireClient(str(api.base_url), gone_s=0)
    return EnvironmentWorker(env.name, env, make_collector, config, wire, notes), notes


def test_a_conversation_that_the_server_refuses_fails_the_rollout(model_url):
    policy = RemotePolicy(f"{model_url}/v1")
    assert asyncio.run(policy.model_name()) == "palestra/tiny"
    with pytest.raises(RolloutError, match="the context holds"):
        asyncio.run(policy.sample(policy.open([5] * 100_000), SHORT))


def test_nothing_runs_ahead_of_the_trainer_by_more_than_a_batch(api, model, model_url):
    register_trainer(api)
    worker, notes = make_worker(api, model, model_url)

    async def main() -> list[dict]:
        running = asyncio.create_task(worker.run())
        while worker.posted_groups < 2:
            assert not running.done()
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert worker.posted_groups == 2
        batches = []
        while len(batches) < 2:
            answer = await asyncio.to_thread(lambda: api.get("/batch").json())
            batches += [answer["batch"]] if answer["batch"] else []
            await asyncio.sleep(0.02)
        await asyncio.wait_for(running, 20)
        return [group for batch in batches for group in batch]

    groups = asyncio.run(main())
    assert len(groups) == 4
    assert len({str(group["tokens"]) for group in groups}) == 4
    assert all(group["env_id"] == 0 and len(group["tokens"]) == 2 for group in groups)
    assert notes.notes[-1] == "the trainer has all the groups that it asked for"


def test_an_api_that_goes_away_ends_it_without_an_error(api, model, model_url):
    register_trainer(api)
    worker, notes = make_worker(api, model, model_url)
    make = worker.make_collector

    async def make_and_lose() -> Collector:
        worker.wire = WireClient("http://127.0.0.1:9", gone_s=0)
        return await make()

    worker.make_collector = make_and_lose
    asyncio.run(worker.run())
    assert "the trajectory API is gone" in notes.notes[-1]


def test_groups_that_cannot_fill_a_batch_are_told_with_the_remedy(api, model, model_url):
    register_trainer(api, batch_size=8)
    worker, _ = make_worker(api, model, model_url, **{"rollout.group_size": 3})
    with pytest.raises(SettingError, match=r"same --rollout\.group_size"):
        asyncio.run(worker.run())


def test_a_training_that_is_over_is_not_fed_but_the_next_is_waited_for(api, model, model_url):
    register_trainer(api, num_steps=0)
    worker, notes = make_worker(api, model, model_url)

    async def main() -> None:
        running = asyncio.create_task(worker.run())
        while not any("waiting for the next" in text for text in notes.notes):
            assert not running.done()
            await asyncio.sleep(0.02)
        assert worker.posted_groups == 0
        await asyncio.to_thread(register_trainer, api, num_steps=1)
        while not await asyncio.to_thread(lambda: api.get("/batch").json()["batch"]):
            await asyncio.sleep(0.05)
        await asyncio.wait_for(running, 20)

    asyncio.run(main())
    assert worker.posted_groups >= 2


def test_an_inference_server_that_is_never_there_ends_it_with_the_reason(api, model, monkeypatch):
    monkeypatch.setattr("palestra.extras.atropos.runs._RETRY_S", 0.01)
    register_trainer(api)
    worker, notes = make_worker(api, model, "http://127.0.0.1:9")
    with pytest.raises(PalestraError, match="--serve-port"):
        asyncio.run(worker.run())
    assert sum("every rollout failed" in text for text in notes.notes) == 7


class ScriptedCollector:
    """Gives the scripted groups in turn: a list of rewards each, None where an attempt failed."""

    def __init__(self, *script: list[float | None]) -> None:
        self.script = list(script)

    async def collect(self, problems, group_size, seed_keys, on_rollout=None) -> list[Group]:
        return [Group(problem.id, tuple(map(self.rollout, self.script.pop(0)))) for problem in problems]

    def rollout(self, reward: float | None) -> Rollout:
        turns = (Turn("template", (1, 2)), Turn("model", (3,), (-0.5,)))
        if reward is None:
            return Rollout("p", turns[:1], (), "failed", error="broken")
        return Rollout("p", turns, (), "answered", reward=reward)


@pytest.mark.parametrize(
    ("script", "posted"),
    [
        ([[1.0, 1.0], [1.0, 0.0]], [1.0, 0.0]),
        ([[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]], [0.0, 0.0]),
        ([[1.0, 1.0], [None, None], [None, None]], [1.0, 1.0]),
        ([[None, None], [None, 1.0], [None, None]], [1.0, 1.0]),
    ],
    ids=["one with signal", "none with signal", "then broken problems", "one attempt that did not fail"],
)
def test_a_group_without_signal_is_replaced_and_a_broken_problem_is_not_posted(api, model, model_url, script, posted):
    register_trainer(api, batch_size=2, num_steps=1)
    worker, _ = make_worker(api, model, model_url, **{"train.filter_equal_groups": True, "train.refill_limit": 2})

    async def make_collector():
        return ScriptedCollector(*script)

    worker.make_collector = make_collector

    async def main() -> list[dict]:
        running = asyncio.create_task(worker.run())
        while not worker.posted_groups:
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)
        batch = await asyncio.to_thread(lambda: api.get("/batch").json()["batch"])
        await asyncio.wait_for(running, 20)
        return batch

    (group,) = asyncio.run(main())
    assert group["scores"] == posted
