"""Execute a run that is described by data: `python -m palestra.run REQUEST.json [trainer | api | env]`.

A `RunRequest` is all that a run needs. `palestra train` executes one in its own process; the supervisor of a run in the
background starts this module with the file request.json of the run folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agent_source import AgentOptions
from palestra.api import train_grpo, train_sft
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError
from palestra.core.extras import provided
from palestra.core.process_end import run_process
from palestra.core.ranks import RankFailed, RankVariables, is_first_rank
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.secrets import redact
from palestra.core.text import visible
from palestra.env_api import train_env
from palestra.envs.discover import load_env
from palestra.envs.running import RunningEnv
from palestra.runs.processes import RUN_VARIABLE, descendants, end_all, identify, processes_of_run
from palestra.runs.request import RunRequest, absolute_name
from palestra.train.watcher import Watcher, sigterm_as_ctrl_c

if TYPE_CHECKING:
    from palestra.train.run import Outcome

Finished = tuple[RunFolder, "Outcome"]
Watching = Callable[[RunConfig], AbstractContextManager[Watcher]]  # a display for a run with this config
_TERMINATE_S = 0.5
_TERMINATE_REST_S = 6.0  # the other processes got SIGTERM from the kernel, too
_DYING_MS = 200


def train(request: RunRequest, watching: Watching, folder: Path | None = None) -> Finished:
    """Train in a new run folder, or in `folder`."""
    if request.env_url is not None:
        return _wire().train(request, watching, folder)
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
        return _wire().resume(run, resumed, watching, request)
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


def _wire() -> Any:
    """Runs whose groups come from environments in other programs."""
    return provided("runs over the wire")


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


def run_part(file: Path, part: str) -> int:
    """Execute one process of a run in the background; returns its exit code."""
    request, folder = RunRequest.load(file), RunFolder(file.parent)
    if part == "api":
        _wire().serve_trajectories(request, folder)
    elif part == "env":
        _wire().serve_environment(_wire().environment_request(request, folder), _background_display)
    elif request.nproc > 1 and RankVariables.of_environment() is None:
        return int(provided("--nproc")([sys.executable, "-P", "-m", "palestra.run", str(file), part], request.nproc))
    elif folder.has_begun:
        resume(Resume(folder.path), _background_display, request)
    else:
        train(request, _background_display, folder.path)
    return 0


@contextmanager
def _background_display(config: RunConfig) -> Iterator[Watcher]:
    from palestra.models.names import hidden_progress_bars, is_local
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
