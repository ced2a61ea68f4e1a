"""The trainer's side of the wire: its client; batches in order, again after a kill, and bad ones left out."""

import asyncio
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from palestra.core import http
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, ServiceError, UnsupportedError, UserCodeError
from palestra.core.http import Reply
from palestra.core.run_folder import RunFolder
from palestra.envs.discover import load_env
from palestra.extras.atropos.protocol import ModelLimits, WireClient
from palestra.extras.atropos.server import trajectory_app
from palestra.extras.atropos.task import Address, WireSource, WireTask
from palestra.models.loading import load_model
from palestra.policy.local import LocalPolicy
from palestra.policy.naive import NaivePolicy
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher


@dataclass
class Batches:
    """A trajectory API that has some batches; None: there is none yet."""

    batches: list[list[dict[str, Any]] | None]
    asked: list[tuple[int, int | None]] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    number: int = 0

    async def batch(
        self, after: int, saved: int | None = None, step: int | None = None
    ) -> tuple[int, list[dict[str, Any]]] | str:
        self.asked.append((after, saved))
        self.steps.append(step)
        groups = self.batches.pop(0)
        if groups is None or isinstance(groups, str):
            return groups or ""
        self.number = max(self.number, after) + 1
        return self.number, groups


class Closed:
    def close(self) -> None: ...


class NoStalls:
    def begin(self) -> None: ...

    async def check(self) -> None: ...


def group(token: int = 7, **more) -> dict[str, Any]:
    return {"tokens": [[1, 2, token]], "masks": [[-100, -100, token]], "scores": [1.0], "env_id": 4} | more


def source_of(*batches: Any, **more) -> tuple[WireSource, Batches, list[str]]:
    client, notes = Batches(list(batches)), []
    fields = {"keeps_batches": True, "stalls": NoStalls()} | more
    source = WireSource(client, ModelLimits(100, 16), Closed(), notes.append, **fields)  # type: ignore[arg-type]
    return source, client, notes


def take(source: WireSource, version: int = 5) -> list[list[int]]:
    groups = asyncio.run(source.next(1, version))
    return [g.rollouts[0].turns[-1].token_ids.tolist() for g in groups]


@pytest.mark.parametrize(
    ("keeps_batches", "cursor", "asked"),
    [
        (True, 0, [(0, 0), (1, 0), (2, 2)]),
        (True, 5, [(5, 5), (6, 5), (7, 7)]),
        (False, 0, [(0, None), (1, None), (2, None)]),
    ],
    ids=["new", "resumed", "without checkpoints"],
)
def test_batches_are_asked_for_after_the_last_and_kept_since_the_last_checkpoint(keeps_batches, cursor, asked):
    source, client, _ = source_of([group(7)], [group(8)], [group(9)], keeps_batches=keeps_batches)
    source.restore({"cursor": cursor})
    assert take(source) == [[7]]
    assert source.state() == {"cursor": cursor + 1}
    assert take(source) == [[8]]
    source.commit()
    assert take(source) == [[9]]
    assert client.asked == asked


def test_while_there_is_no_batch_the_reason_is_logged_once_and_a_stall_ends_the_wait(monkeypatch):
    monkeypatch.setattr("palestra.extras.atropos.task._POLL_S", 0.0)
    checks = iter([None, None, PalestraError("no group for 60 s")])

    class Stalls(NoStalls):
        async def check(self) -> None:
            if (error := next(checks)) is not None:
                raise error

    stuck = "groups of 4 never add up to a batch of 6"
    source, client, notes = source_of(stuck, stuck, None, stalls=Stalls())
    with pytest.raises(PalestraError, match="no group for"):
        take(source)
    assert len(client.asked) == 3
    assert notes == [stuck]


def test_what_cannot_be_trained_is_left_out_with_a_note():
    broken = group(tokens=None)
    source, _, notes = source_of([group(1000), group(8), broken], [group(2000)], [group(9)])
    assert take(source) == [[8]]
    assert take(source) == [[9]], "a batch in which there is nothing to train is skipped"
    assert source.state() == {"cursor": 3}
    assert notes[0] == (
        "batch-1/0 from environment 4 cannot be trained: token id 1000 is outside of the vocabulary of 100"
    )
    assert notes[1].startswith("batch-1/2 from environment 4 cannot be trained")
    assert notes[2].startswith("batch-2/0")


@pytest.mark.parametrize(
    "more", [{"scores": [1e39]}, {"scores": [float("nan")]}, {"advantages": [[0.0, 0.0, 1e308]]},
             {"versions": [[0, 0, 2**40]]}]
)  # fmt: skip
def test_values_that_do_not_fit_float32_are_dropped_by_name(more):
    source, _, notes = source_of([group(8, **more), group(9)])
    assert take(source) == [[9]]
    assert notes[0].startswith("batch-1/0 from environment 4 cannot be trained")


def test_a_batch_without_a_trainable_group_is_no_step_for_the_environments():
    source, client, _ = source_of([group(1000)], [group(7)], [group(8)], step=3)
    take(source)
    take(source)
    assert client.steps == [3, 3, 4]


def test_a_batch_that_was_set_aside_is_told():
    source, client, notes = source_of([group(7)], [group(8)])
    take(source)
    client.number = 2
    take(source)
    assert notes == ["batch 2 was set aside by the trajectory API: this run ended on it again and again"]


def test_columns_that_this_trainer_does_not_use_are_told_once():
    posted = group(ref_logprobs=[[0.0] * 3], images=[["x"]], generation_params={}, group_overrides=None)
    source, _, notes = source_of([posted], [posted])
    take(source)
    take(source)
    assert [note.split()[2] for note in notes] == ["images,", "ref_logprobs,"]


def test_batches_of_which_nothing_can_be_trained_end_the_run_with_the_reason():
    source, client, _ = source_of(*([group(1000)] for _ in range(20)))
    with pytest.raises(UserCodeError, match=r"8 batches in a row .* token id 1000 is outside"):
        take(source)
    assert len(client.asked) == 8


def test_logprobs_count_unless_the_columns_say_that_the_current_policy_sampled():
    source, _, _ = source_of([group(), group(versions=[[0, 0, 5]])])
    groups = asyncio.run(source.next(1, version=5))
    assert [g.rollouts[0].turns[-1].versions.tolist() for g in groups] == [[4], [5]]


def test_echo_without_marked_tool_results_is_told_once():
    marked = group(turns=[[["template", 1], ["environment", 1], ["model", 1]]])
    source, _, notes = source_of([marked, group()], [group()], [group()], echo=True)
    take(source)
    assert notes == []
    take(source)
    take(source)
    (note,) = notes
    assert "echo.coefficient has no effect" in note


@pytest.fixture
def api(serve, tmp_path) -> httpx.Client:
    return httpx.Client(base_url=serve(trajectory_app(tmp_path / "wire")), timeout=30)


def task_of(api: httpx.Client, tmp_path, **more) -> tuple[WireTask, RunConfig]:
    config = RunConfig.build({"train.max_steps": 3, "train.problems_per_step": 2, "rollout.group_size": 4})
    folder = RunFolder.create(tmp_path / "runs", "wire", config, {})
    loaded = load_model("palestra/tiny")
    fields = {"client": WireClient(str(api.base_url)), "address": Address(port=0), "loaded": loaded, "folder": folder}
    return WireTask(**(fields | more)), config


class RegistersAndLooks:
    """Registers a trainer, and looks whether its model is served already."""

    def __init__(self, api: httpx.Client, model_url: str) -> None:
        self.wire, self.model_url, self.was_served = WireClient(str(api.base_url)), model_url, True

    async def register(self, *arguments: Any) -> None:
        await self.wire.register(*arguments)
        try:
            await health(self.model_url)
        except httpx.TransportError:
            self.was_served = False


async def health(url: str) -> int:
    """The server begins to listen when the loop of this coroutine runs: an early connection is tried again."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=4), timeout=20) as client:
        return (await asyncio.to_thread(client.get, f"{url}/health")).status_code


def test_the_model_is_served_once_its_weights_can_be_loaded_and_no_longer_than_its_source(api, tmp_path):
    """A resumed run loads its weights after its parts are built: nobody may sample from the base model meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client, urls = RegistersAndLooks(api, f"http://127.0.0.1:{port}"), []
    served = {"client": client, "address": Address(port=port), "served": lambda url, tokenizer: urls.append(url)}
    task, config = task_of(api, tmp_path, **served)
    with asyncio.Runner() as runner:
        policy = LocalPolicy(task.loaded.model, task.loaded.tokenizer, kv_memory_gib=0.05, self_check=False)
        source = task.source(Parts(config, policy, task.loaded.tokenizer, runner, Watcher()))
        assert api.get("/info").json()["batch_size"] == 8
        assert not client.was_served
        assert urls == [client.model_url]
        assert source.reward_weights == {}
        assert runner.run(health(urls[0])) == 200
        source.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/health")


def test_an_environment_of_ours_scores_the_model_and_weighs_its_measures(api, tmp_path):
    environment = load_env("calculator", {"held_out_size": "3"})
    task, config = task_of(api, tmp_path, scored_by=EnvironmentTask(environment))
    with asyncio.Runner() as runner:
        policy = LocalPolicy(task.loaded.model, task.loaded.tokenizer, kv_memory_gib=0.05, self_check=False)
        parts = Parts(config, policy, task.loaded.tokenizer, runner, Watcher())
        source, evaluator = task.source(parts), task.evaluator(parts)
        assert source.reward_weights == environment.reward_weights
        assert len(evaluator.problems) == 3
        source.close()
        naive = NaivePolicy(task.loaded.model, task.loaded.tokenizer)
        with pytest.raises(UnsupportedError, match=r"model\.engine"):  # it cannot be served
            task.source(replace(parts, policy=naive))
    assert task_of(api, tmp_path)[0].evaluator(parts) is None, "nothing is made up where nothing can be scored"


@pytest.mark.parametrize(("every", "told"), [(5, ["eval.every = 5 has no effect: these environments"]), (0, [])])
def test_it_is_told_that_foreign_environments_do_their_own_evaluations(every: int, told: list[str], tmp_path):
    notes: list[str] = []
    watcher = Watcher()
    watcher.note = notes.append  # type: ignore[method-assign]
    parts = Parts(RunConfig.build({"eval.every": every}), None, None, None, watcher)  # type: ignore[arg-type]
    task = WireTask(None, Address(), None, RunFolder(tmp_path))  # type: ignore[arg-type]
    assert task.evaluator(parts) is None
    assert [note[: len(told[0])] for note in notes] == told


NOWHERE = WireClient("http://127.0.0.1:9", give_up_s=0)


@pytest.fixture
def replies(monkeypatch):
    """What the API answers, one after the other; the methods that it was asked by."""
    answers, methods = [], []

    async def send(request: http.Request) -> Reply:
        methods.append(request.method or "GET")
        status, body = answers.pop(0)
        return Reply(status, body, {})

    monkeypatch.setattr(http.Request, "send_async", send)
    return answers, methods


def test_a_server_that_gives_batches_by_get_alone_is_asked_so_and_one_that_is_not_there_is_told(monkeypatch, replies):
    answers, methods = replies
    answers += [(405, b"Method Not Allowed"), (200, b'{"batch": [{"tokens": []}]}')]
    assert asyncio.run(NOWHERE.batch(3)) == (4, [{"tokens": []}])
    assert methods == ["POST", "GET"]
    monkeypatch.undo()
    with pytest.raises(ServiceError, match="palestra trajectory"):
        asyncio.run(NOWHERE.batch(0))


def test_an_api_that_forgot_its_trainer_ends_the_run_instead_of_an_endless_wait(replies):
    answers, _ = replies
    answers += [(200, b'{"batch": null, "status": "error", "message": "no trainer is registered"}')]
    with pytest.raises(ServiceError, match="no trainer is registered"):
        asyncio.run(NOWHERE.batch(3))
    answers += [(200, b'{"batch": null, "message": "groups of 4 never add up"}')]
    assert asyncio.run(NOWHERE.batch(3)) == "groups of 4 never add up"


@pytest.mark.parametrize("answer", [(404, b"Not Found"), (501, b"Unsupported method"), (200, b"<html>")])
def test_a_server_that_is_no_trajectory_api_is_told_at_once(replies, answer, tmp_path):
    answers, _ = replies
    answers += [answer]
    folder = RunFolder.create(tmp_path, "clerk", RunConfig().with_step_size(), {})
    with pytest.raises(ServiceError, match="no trajectory API; `palestra trajectory` starts one"):
        asyncio.run(NOWHERE.register(folder.config, 0, 512, folder))
