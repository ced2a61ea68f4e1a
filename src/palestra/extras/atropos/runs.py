"""Runs over the wire: environments in other programs post scored groups, and a trainer takes them.

One of our environments as a separate program (`EnvironmentWorker`) samples from the trainer's model:
register -> wait for the trainer -> [look for room -> attempt problems -> post] until the last step
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from palestra.cli.serve import run_server
from palestra.core.config import RunConfig, flatten
from palestra.core.errors import PalestraError, SettingError
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.time_limit import outside_event_loop
from palestra.envs.base import Environment
from palestra.envs.discover import env_class, find_env, load_env
from palestra.envs.running import RunningEnv
from palestra.extras.atropos import WIRE_DEFAULTS
from palestra.extras.atropos.atropos import TRAINER_URL, AtroposEnv
from palestra.extras.atropos.protocol import ApiUnreachable, WireClient, write_group
from palestra.models.chat.template import ChatFormat
from palestra.policy.openai import OpenAISettings
from palestra.policy.remote import RemotePolicy
from palestra.rollout.collect import Collector, GroupCollector
from palestra.run import Finished, Watching, open_env
from palestra.runs.index import listed_early
from palestra.runs.request import RunRequest, absolute_name
from palestra.train.watcher import Watcher

if TYPE_CHECKING:
    from palestra.extras.atropos.task import Address
    from palestra.train.group_source import ProblemSource
    from palestra.train.run import Outcome
    from palestra.train.tasks import EnvironmentTask, Task

_POLL_S = 0.2
_RETRY_S = 1.0
_FAILURES_IN_A_ROW = 8  # groups without one whole attempt, after which going on is pointless


class TrainerStatus(NamedTuple):
    """The trainer's step, and the number of groups that it can still take from this environment."""

    step: int
    num_steps: int
    room_groups: int

    @property
    def is_over(self) -> bool:
        return self.step >= self.num_steps


@dataclass(slots=True)
class EnvironmentWorker:
    """The environment's side of the wire. `make_collector` is called once the trainer serves its model."""

    name: str
    environment: Environment
    make_collector: Callable[[], Awaitable[GroupCollector]]
    config: RunConfig
    wire: WireClient
    watcher: Watcher
    env_id: int = -1
    posted_groups: int = 0
    scores: list[float] = field(default_factory=list)  # of the posted rollouts
    _num_steps: int = 0
    _failures: int = 0
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def run(self) -> None:
        """Feed the trainer until its last step, or until the trajectory API cannot be reached any more."""
        registration = {
            "max_token_length": self.config.rollout.max_new_tokens,
            "desired_name": self.name,
            "weight": 1.0,
            "group_size": self.config.rollout.group_size,
        }
        self.watcher.note(f"{self.name} registers at {self.wire.url}, and waits until a trainer has started")
        # before it was ever there, the API is waited for longer
        patient = replace(self.wire, gone_s=None)
        while (answer := await patient.call("/register-env", registration))["status"] != "success":
            await asyncio.sleep(_RETRY_S)
        self.env_id, self._num_steps = int(answer["env_id"]), int(answer["num_steps"])
        try:
            if (await self._trainer_status()).is_over:  # the API remembers a trainer that has ended
                self.watcher.note("the last training there is over; waiting for the next")
            while (await self._trainer_status()).is_over:
                await asyncio.sleep(_RETRY_S)
            from palestra.train.group_source import ProblemSource  # here: it loads torch

            # the first environment draws problems and seeds as the trainer's own process would, the next ones others
            source = ProblemSource(
                await self.make_collector(),
                self.environment.problems("train"),
                self.environment.reward_weights,
                self.config.rollout.group_size,
                self.config.seed + self.env_id,
                max_staleness=None,
                gives_back=False,  # several groups are in flight
            )
            await self._post_groups(source)
            self.watcher.note("the trainer has all the groups that it asked for")
        except ApiUnreachable as gone:
            self.watcher.note(f"the trajectory API is gone: {gone}")
        finally:
            with contextlib.suppress(PalestraError):
                await replace(self.wire, give_up_s=0, gone_s=None).call("/disconnect-env", {"env_id": self.env_id})

    async def _trainer_status(self) -> TrainerStatus:
        status = await self.wire.call("/status-env", {"env_id": self.env_id}, method="GET")
        batch_size = int((await self.wire.call("/info"))["batch_size"])
        size = self.config.rollout.group_size
        if batch_size % size:
            raise SettingError(
                f"the trainer takes batches of {batch_size} sequences, which groups of {size} do not fill exactly; "
                "give both sides the same --rollout.group_size"
            )
        # one batch besides the one being trained: more would wait longer, and be sampled from older weights
        room = batch_size // size - int(status["self_queue_size"])
        return TrainerStatus(int(status["current_step"]), int(status.get("num_steps", self._num_steps)), room)

    async def _post_groups(self, source: ProblemSource) -> None:
        running: set[asyncio.Task[None]] = set()
        noted_step = -1
        try:
            while not (status := await self._trainer_status()).is_over:
                if status.step != noted_step:
                    noted_step, recent = status.step, self.scores[-64:]
                    mean = f", recent mean score {sum(recent) / len(recent):.2f}" if recent else ""
                    steps = f"step {status.step}/{status.num_steps}"
                    self.watcher.note(f"{steps}: {self.posted_groups} groups posted{mean}")
                most = max(1, self.config.rollout.max_open_episodes // self.config.rollout.group_size)
                for _ in range(min(status.room_groups, most) - len(running)):
                    running.add(asyncio.create_task(self._one_group(source)))
                if not running:
                    await asyncio.sleep(_POLL_S)
                    continue
                done, running = await asyncio.wait(running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_group(self, source: ProblemSource) -> None:
        """Attempt a problem and post its group, unless every attempt failed. `train.refill_limit` bounds refills."""
        from palestra.train.group_source import gather

        number = source.drawn
        try:
            groups = (await gather(source, 1, self.config, version=0)).groups
        except PalestraError as error:
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise
            self.watcher.note(str(error))
            await asyncio.sleep(_RETRY_S)
            return
        self._failures = 0
        # the last one has signal if any has, unless its problem is broken
        group = next(g for g in reversed(groups) if any(r.error is None for r in g.rollouts))
        body = write_group(group, self.env_id, self.config.train.mask_truncated)
        await self.wire.call("/scored_data", body, key=f"{self._key}/{number}")
        self.posted_groups += 1
        self.scores += group.rewards


_API_UNREACHABLE_S = 60.0
_TRAINER_SERVER = {
    "base_url": TRAINER_URL,
    "api_key_env": "PALESTRA_TOKEN",
    "timeout_s": 600,  # a trainer does not answer during a step
    "max_concurrent": 128,
}


def train(request: RunRequest, watching: Watching, folder: Path | None = None) -> Finished:
    """Train a new run on what environments post to `request.env_url`."""
    run = new_wire_run(request, folder)
    return run, _train_request(request, run, watching)


def resume(run: RunFolder, resumed: Resume, watching: Watching, request: RunRequest | None) -> Finished:
    """Continue or finish a run over the wire; `request` has its addresses."""
    if resumed.finish:
        with watching(run.config) as watcher:
            from palestra.train.tasks import FinishTask

            return run, _train(run, FinishTask(_scorer(run)), watcher=watcher, resume=resumed)
    if request is None or request.env_url is None:
        raise SettingError(f"{run.path} trains over the wire; continue it with: {run.wire_command}")
    return run, _train_request(request, run, watching, resumed)


def new_wire_run(request: RunRequest, folder: Path | None = None) -> RunFolder:
    """A new run with the settings that suit the environment; one of ours also scores the model."""
    own: Any = {}
    record: dict[str, Any] = {"env_url": request.env_url}
    if request.environment is not None:
        found, settings = find_env(request.environment), dict(request.env_settings)
        if found.dialect == "palestra":
            own = env_class(found).run_settings
            record["scored_by"] = {"name": absolute_name(request.environment), "settings": settings}
        else:
            more = {"openai": dict(request.server_settings), "packages": list(request.packages)}
            record["atropos"] = {"file": str(found.file_path), "env": settings, **more}
    config = wire_config(request, own)
    return RunFolder.create(Path(config.output_dir), "wire", config, record, at=folder)


def wire_config(request: RunRequest, own: Any = ()) -> RunConfig:
    """The config of a run over the wire, which needs a last step."""
    config = request.config(WIRE_DEFAULTS, dict(own))
    if config.train.max_steps is None:
        raise SettingError("environments over the wire have no last problem; set an end: --train.max_steps 100")
    return config


def _train_request(request: RunRequest, run: RunFolder, watching: Watching, resumed: Resume | None = None) -> Outcome:
    from palestra.extras.atropos.task import Address

    assert request.env_url is not None
    # environments written for Atropos cannot send a token
    token = os.environ.get("PALESTRA_TOKEN") or None if request.dialect == "palestra" else None
    with watching(run.config) as watcher, listed_early(run.path, resumed):
        watcher.run_dir = run.path  # it can be resumed from here, also if loading is interrupted
        return train_wire(
            run,
            WireClient(request.env_url, token, note=watcher.note),
            Address(port=request.serve_port, token=token),
            watcher=watcher,
            resume=resumed,
            served=lambda url, tokenizer: watcher.note(f"environments sample from {url}/v1"),
            wait_limit_s=request.wait_limit_s,
        )


def serve_environment(request: RunRequest, watching: Watching) -> EnvironmentWorker:
    """Post groups of an environment to the trajectory API at `env_url`, until the trainer's last step."""
    assert request.environment is not None
    assert request.env_url is not None
    if request.dialect != "palestra":
        AtroposEnv.of(request).serve(request.config(WIRE_DEFAULTS), request.env_url)
    env, config = open_env(request)
    served_as = request.server_settings.get("model_name") or request.settings.get("model.name")
    server = OpenAISettings.read({**_TRAINER_SERVER, **request.server_settings, "model_name": served_as or ""})
    token, at_once = os.environ.get(server.api_key_env), server.max_concurrent
    policy = RemotePolicy(server.base_url, token=token, timeout_s=server.timeout_s, max_concurrent=at_once)
    wire = WireClient(request.env_url, os.environ.get("PALESTRA_TOKEN"), gone_s=_API_UNREACHABLE_S)
    with watching(config) as watcher:
        return serve_env(env, config, wire, policy, model_name=served_as, watcher=watcher)


def environment_request(request: RunRequest, folder: RunFolder) -> RunRequest:
    """The request of the environment's process: it samples with the settings of the trainer."""
    settings = flatten(folder.config.model_dump(mode="json"))
    if "train.filter_equal_groups" not in request.settings:
        del settings["train.filter_equal_groups"]  # over the wire it is the environment that filters
    own = dict(request.env_settings)
    if "total_steps" in own:  # the run may have been lengthened since
        own["total_steps"] = folder.config.train.max_steps
    server = {**request.server_settings, "base_url": f"http://127.0.0.1:{request.serve_port}/v1"}
    return replace(request, settings=settings, backend="local", env_settings=own, server_settings=server)


def serve_trajectories(request: RunRequest, folder: RunFolder) -> None:
    """Serve the trajectory API of a run until SIGTERM."""
    from palestra.extras.atropos.server import trajectory_app
    from palestra.servers.web import open_port

    token = os.environ.get("PALESTRA_TOKEN") or None
    socket = open_port("127.0.0.1", request.api_port or 0, token)
    run_server(trajectory_app(folder.wire, token=token), socket, "the trajectory API is at")


def train_wire(
    run: RunFolder,
    client: WireClient,
    address: Address,
    *,
    watcher: Watcher | None = None,
    resume: Resume | None = None,
    served: Callable[[str, Any], None] = lambda url, tokenizer: None,
    wait_limit_s: float = 60.0,
) -> Outcome:
    """Serve the model, train it on what environments in other programs post, save it.

    It is evaluated here if run.json names an environment of ours. `served` is called with the inference URL and the
    tokenizer. Where the environment fails and no group arrives for `wait_limit_s` (0: any time), the run stops with
    the reason.
    """
    from palestra.extras.atropos.task import WireTask
    from palestra.train.setup import load_for_run

    loaded = load_for_run(run.config)
    task = WireTask(client, address, loaded, run, _scorer(run), served, wait_limit_s)
    return _train(run, task, loaded=loaded, watcher=watcher, resume=resume)


def _scorer(run: RunFolder) -> EnvironmentTask | None:
    """The environment of ours that scores a run over the wire, if run.json names one."""
    from palestra.train.tasks import EnvironmentTask

    scored_by = run.environment("scored_by")
    return EnvironmentTask(load_env(*scored_by)) if scored_by else None


def _train(run: RunFolder, task: Task, **parts: Any) -> Outcome:
    from palestra.train.run import Run

    def train() -> Outcome:
        with asyncio.Runner() as runner:
            return Run.build(run.config, task, run, runner=runner, **parts).train()

    return outside_event_loop(train)


def serve_env(
    env: RunningEnv,
    config: RunConfig,
    wire: WireClient,
    policy: RemotePolicy,
    *,
    model_name: str | None = None,
    watcher: Watcher | None = None,
) -> EnvironmentWorker:
    """Feed a trainer in another process with scored groups until its last step, sampled from the model that it serves.

    `model_name` says whose tokenizer to use; None: that of the model that the server serves.
    """
    from palestra.models.loading import load_tokenizer
    from palestra.train.tasks import agent_collector

    config.refuse(["rollout.constrain_tool_calls"], "the trainer's server samples, and it takes no grammar")

    async def make_collector() -> Collector:
        tokenizer = load_tokenizer(model_name or await policy.model_name())
        return agent_collector(env, policy, ChatFormat(tokenizer), config, training=True)

    worker = EnvironmentWorker(env.name, env, make_collector, config.with_step_size(), wire, watcher or Watcher())
    outside_event_loop(lambda: asyncio.run(worker.run()))
    return worker
