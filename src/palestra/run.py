"""Execute a run that is described by data: `python -m palestra.run REQUEST.json [trainer | api | env]`.

A `RunRequest` is all that a run needs. `palestra train` executes one in its own process; the supervisor of a run in the
background starts this module with the file request.json of the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agent_source import AgentOptions
from palestra.api import train_grpo, train_sft
from palestra.core.config import RunConfig, flatten
from palestra.core.errors import PalestraError, SettingError
from palestra.core.process_end import run_process
from palestra.core.ranks import RankFailed, RankVariables, is_first_rank, launch_ranks
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.secrets import redact
from palestra.core.show import visible
from palestra.env_api import finish_wire, serve_env, train_env, train_wire
from palestra.envs.load import env_class, find_env, load_env
from palestra.envs.running import RunningEnv
from palestra.policy.openai import OpenAISettings
from palestra.policy.remote import RemotePolicy
from palestra.runs.processes import RUN_VARIABLE, descendants, end_all, identify, processes_of_run
from palestra.runs.request import RunRequest, absolute_name
from palestra.sources.wire import WIRE_DEFAULTS
from palestra.sources.wire.atropos import TRAINER_URL, AtroposEnv
from palestra.sources.wire.protocol import WireClient
from palestra.train.interrupt import sigterm_as_ctrl_c
from palestra.train.watcher import Watcher

if TYPE_CHECKING:
    from palestra.sources.wire.worker import EnvironmentWorker
    from palestra.train.run import Outcome

Finished = tuple[RunFolder, "Outcome"]
Watching = Callable[[RunConfig], AbstractContextManager[Watcher]]  # a display for a run with this config
_BACKLOG = 2048  # connections that wait until the server accepts them
_API_UNREACHABLE_S = 60.0
_TERMINATE_S = 0.5
_TERMINATE_REST_S = 6.0  # the other processes got SIGTERM from the kernel, too
_DYING_MS = 200
_TRAINER_SERVER = {
    "base_url": TRAINER_URL,
    "api_key_env": "PALESTRA_TOKEN",
    "timeout_s": 600,  # a trainer does not answer during a step
    "max_concurrent": 128,
}


def train(request: RunRequest, watching: Watching, folder: Path | None = None) -> Finished:
    """Train in a new run folder, or in `folder`."""
    if request.env_url is not None:
        run = new_wire_run(request, folder)
        return run, _train_wire(request, run, watching)
    if request.environment is not None:
        env, config = open_env(request)
        record = {"environment": {"name": absolute_name(request.environment), "settings": dict(request.env_settings)}}
        with watching(config) as watcher:
            result = train_env(env, config, watcher=watcher, record=record, folder=folder)
        return result.run, result.outcome
    options = AgentOptions.from_record(request.agent)
    if request.only_learns_traces:
        config = request.config()
        with watching(config) as watcher:
            return train_sft(config, name=request.name or "sft", watcher=watcher, folder=folder)
    return _train_agent(request.agent_file, options, request.run_settings, watching, folder=folder)


def resume(
    resumed: Resume, watching: Watching, request: RunRequest | None = None, agent_file: str | None = None
) -> Finished:
    """Continue or finish a run by what its run.json says; `request` has the addresses of a run over the wire."""
    run = RunFolder.open(resumed.folder)
    if environment := run.environment():
        env = load_env(*environment)
        with watching(run.config) as watcher:
            return run, train_env(env, run.config, watcher=watcher, resume=resumed).outcome
    if "env_url" in run.record or (request is not None and request.env_url is not None):
        if resumed.finish:
            with watching(run.config) as watcher:
                return run, finish_wire(run, resumed, watcher=watcher)
        if request is None or request.env_url is None:
            raise SettingError(f"{run.path} trains over the wire; continue it with: {run.wire_command}")
        return run, _train_wire(request, run, watching, resumed)
    source = agent_file or run.record.get("source")
    if run.record.get("only_learns_traces"):
        with watching(run.config) as watcher:
            return train_sft(run.config, name=run.record["name"], watcher=watcher, resume=resumed)
    options = AgentOptions.from_record(run.record.get("agent_options"))
    if source is None and not options.are_set:
        raise SettingError(
            f"{run.path} was started from Python. Continue it there with train_grpo(…, resume={str(run.path)!r}), "
            f"or give the agent's file: palestra train my_agent.py --resume {shlex.quote(str(run.path))}"
        )
    settings = {"model.name": run.config.model.name}
    return _train_agent(source, options, settings, watching, config=run.config, resume=resumed)


def check(request: RunRequest) -> None:
    """Load the environment or the agent file, so that a mistake is reported before a background run starts."""
    if request.environment is None:
        AgentOptions.from_record(request.agent).open(request.agent_file, request.run_settings)
    elif request.dialect == "palestra":
        open_env(request)


def open_env(request: RunRequest) -> tuple[RunningEnv, RunConfig]:
    """The environment of a request, and the run's config: the request's settings over those that suit it."""
    assert request.environment is not None
    env = load_env(request.environment, request.env_settings)
    return env, request.config(env.env.run_settings)


def new_wire_run(request: RunRequest, folder: Path | None = None) -> RunFolder:
    """A new run with the settings that suit the environment; one of ours also scores the model."""
    own: Any = {}
    record: dict[str, Any] = {"env_url": request.env_url}
    found = find_env(request.environment) if request.environment is not None else None
    if found is not None and found.dialect == "palestra":
        own = env_class(found).run_settings
        record["scored_by"] = {"name": absolute_name(request.environment), "settings": dict(request.env_settings)}
    elif found is not None:
        settings = {"env": dict(request.env_settings), "openai": dict(request.server_settings)}
        record["atropos"] = {"file": str(found.file_path), **settings, "packages": list(request.packages)}
    config = wire_config(request, own)
    return RunFolder.create(Path(config.output_dir), "wire", config, record, at=folder)


def wire_config(request: RunRequest, own: Any = ()) -> RunConfig:
    """The config of a run over the wire, which needs a last step."""
    config = request.config(WIRE_DEFAULTS, dict(own))
    if config.train.max_steps is None:
        raise SettingError("environments over the wire have no last problem; set an end: --train.max_steps 100")
    return config


def _train_agent(
    source: str | None, options: AgentOptions, settings: Any, watching: Watching, *, config: Any = None, **more: Any
) -> Finished:
    file, agent, own = options.open(source, settings)
    record = {"agent_options": options.record()} if options.are_set else None
    with watching(config or own) as watcher:
        result = train_grpo(
            agent,
            file.suite,
            file.measures,
            config=config or own,
            reward_weights=file.reward_weights,
            held_out=file.held_out,
            watcher=watcher,
            source=file.source or None,
            record=record,
            **more,
        )
    return result.run, result.outcome


def _train_wire(request: RunRequest, run: RunFolder, watching: Watching, resumed: Resume | None = None) -> Outcome:
    from palestra.sources.wire.task import Address

    assert request.env_url is not None
    # environments written for Atropos cannot send a token
    token = os.environ.get("PALESTRA_TOKEN") or None if request.dialect == "palestra" else None
    with watching(run.config) as watcher:
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
        file = find_env(request.environment).file_path
        env_of_others = AtroposEnv(file, request.env_settings, request.server_settings, request.packages)
        env_of_others.serve(request.config(WIRE_DEFAULTS), request.env_url)
    env, config = open_env(request)
    served_as = request.server_settings.get("model_name") or request.settings.get("model.name")
    server = OpenAISettings.read({**_TRAINER_SERVER, **request.server_settings, "model_name": served_as or ""})
    with watching(config) as watcher:
        wire = WireClient(request.env_url, os.environ.get("PALESTRA_TOKEN"), gone_s=_API_UNREACHABLE_S)
        policy = RemotePolicy(
            server.base_url,
            token=os.environ.get(server.api_key_env),
            timeout_s=server.timeout_s,
            max_concurrent=server.max_concurrent,
        )
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
    from palestra.servers.web import Server, open_port
    from palestra.sources.wire.server import trajectory_app

    token = os.environ.get("PALESTRA_TOKEN") or None
    socket = open_port("127.0.0.1", request.api_port or 0, token)
    socket.listen(_BACKLOG)
    app = trajectory_app(folder.wire, token=token)
    asyncio.run(Server(app, handle_signals=True).serve(sockets=[socket]))


def run_part(file: Path, part: str) -> int:
    """Execute one process of a run in the background; returns its exit code."""
    request, folder = RunRequest.load(file), RunFolder(file.parent)
    if part == "api":
        serve_trajectories(request, folder)
    elif part == "env":
        serve_environment(environment_request(request, folder), _background_display)
    elif request.nproc > 1 and RankVariables.of_environment() is None:
        return launch_ranks([sys.executable, "-P", "-m", "palestra.run", str(file), part], request.nproc)
    elif folder.has_begun:
        resume(Resume(folder.path), _background_display, request)
    else:
        train(request, _background_display, folder.path)
    return 0


@contextmanager
def _background_display(config: RunConfig) -> Iterator[Watcher]:
    from palestra.models.progress_bars import hidden_progress_bars, is_local
    from palestra.train.progress import console_progress

    bars = hidden_progress_bars() if is_local(config.model.name) else contextlib.nullcontext()
    with bars, console_progress(log_every=config.track.log_every) as display:
        yield display


@contextmanager
def _outliving_supervisor(part: str) -> Iterator[None]:
    """If the supervisor dies, end what is left of the run: the kernel sends SIGTERM, and the trainer saves its step."""
    run_id, supervisor = os.environ.get(RUN_VARIABLE), os.getppid()
    if run_id is None:
        yield
        return
    output = os.dup(1)  # the pipe that the supervisor reads
    threading.Thread(target=_discard_output, args=(output,), daemon=True).start()
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second one must not interrupt this
            signal.signal(number, signal.SIG_IGN)
        # SIGTERM comes with the end of each of the supervisor's threads, so perhaps before that of the process
        is_rank = RankVariables.of_environment() is not None
        if part != "env" and not is_rank and (_is_closed(output, _DYING_MS) or identify(supervisor) is None):
            end_all(descendants(os.getpid()), _TERMINATE_S)
            if part == "trainer":
                end_all(processes_of_run(run_id), _TERMINATE_REST_S)


def _is_closed(pipe: int, wait_ms: int | None) -> bool:
    """Whether the reader of a pipe has closed it; waits up to `wait_ms` (None: no limit)."""
    poll = select.poll()
    poll.register(pipe, 0)  # errors alone
    return any(event & select.POLLERR for _, event in poll.poll(wait_ms))


def _discard_output(output: int) -> None:
    """Wait until the supervisor, which reads our output, has gone; discard what is printed from then on.

    Otherwise the next line that is printed would fail, perhaps while a checkpoint is being written.
    """
    _is_closed(output, None)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def main(words: list[str]) -> int:
    """Exit codes: 0 success, 2 invalid input or a failed run (the last lines say why), 130 stopped."""
    if len(words) not in (1, 2) or words[1:] not in ([], ["trainer"], ["api"], ["env"]):
        print("usage: python -m palestra.run REQUEST.json [trainer | api | env]", file=sys.stderr)
        return 2
    part = words[1] if words[1:] else "trainer"
    try:
        with sigterm_as_ctrl_c(), _outliving_supervisor(part):
            return run_part(Path(words[0]).absolute(), part)
    except KeyboardInterrupt:
        print("stopped; every finished step is saved", file=sys.stderr)
        return 130
    except PalestraError as error:
        if os.environ.get("PALESTRA_DEBUG", "0") not in ("", "0"):
            raise
        if is_first_rank() or not isinstance(error, RankFailed):
            print(f"Error: {visible(redact(str(error)))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_process(main)
