"""`palestra train` and `palestra sft` train an agent, and compare before and after; `palestra eval` scores without."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra import run as executor
from palestra.agent_source import AgentFile, AgentOptions
from palestra.agents.programs import ProgramAgent
from palestra.api import evaluate
from palestra.cli import settings
from palestra.cli.common import PATH, agent_options, load_libraries, out_option, wait_limit_option
from palestra.cli.find_run import code_of_run, find_run, require_run, require_trust, trust_option, with_model_of_run
from palestra.cli.serve import require_serve_extra
from palestra.cli.settings import EnvCommand, layer, read_settings
from palestra.cli.summary import capability_of, print_evaluation, print_outcome
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.extras import provided
from palestra.core.ranks import RankVariables, is_first_rank
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.text import show_path
from palestra.evals.evidence import RunFacts
from palestra.evals.suite import EvalSuite, hold_out
from palestra.runs.index import refuse_busy
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.request import PALESTRA
from palestra.train.progress import Display, make_display
from palestra.train.watcher import sigterm_as_ctrl_c


class DryRun(Exception):
    """Ends a run with --dry-run when it is ready to start."""


@settings.command_of_run("train", cls=EnvCommand)
@click.argument("agent_file", required=False)
@click.option("--env", metavar="NAME_OR_FILE", help="Train on an environment instead; `palestra envs` lists them.")
@click.option("--env-url", metavar="URL", help="Train on what environments post to the trajectory API at this URL.")
@agent_options
@click.option("--folder", type=PATH, help="Use this as the run folder, instead of a new one.")
@click.option("--detach", is_flag=True, help="Train in the background; `palestra runs` shows its progress.")
@click.option("--wire", is_flag=True, help="With --detach: run the environment in a process of its own.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Train in N processes, one for each GPU.")
@click.option("--dry-run", is_flag=True, help="Load everything, say what the run would need, and end.")
@click.option("--serve-port", default=9001, show_default=True, help="With --env-url: where environments sample.")
@wait_limit_option
@click.option("--resume", metavar="RUN", help="Continue a run that was stopped: its id, name or folder.")
@click.option("--from-checkpoint", metavar="STEP", help="With --resume: a step, or best. [default: the newest]")
@trust_option
def command(
    agent_file: str | None,
    env: str | None,
    env_url: str | None,
    folder: Path | None,
    detach: bool,
    wire: bool,
    nproc: int | None,
    dry_run: bool,
    serve_port: int,
    wait_limit_s: float,
    config_file: Path | None,
    resume: str | None,
    from_checkpoint: str | None,
    trust: bool,
    console: Console,
    **parameters: Any,
) -> dict[str, Any] | None:
    """Train an agent on its suite, with its measures as the reward; then compare before and after.

    AGENT_FILE is a Python file that defines `agent` and `suite`, and may define `held_out`, `measures`,
    `reward_weights` and `config`. Without one, the demo agent is trained.

    \b
    Examples:
      palestra train
      palestra train my_agent.py --seed 1
      palestra train my_agent.py --train.learning_rate 2e-5 --train.max_steps 100 --lora.r 8
      palestra train my_agent.py --config run.yaml --model.name Qwen/Qwen3-0.6B
      palestra train my_agent.py --model.name k3f9@best        go on from the model of another run
      palestra train --env calculator --env.operations 1
      palestra train --agent-cmd "python my_agent.py" --cases cases.jsonl --measure score.py:score
      palestra train --mcp "python server.py" --cases cases.jsonl --measure score.py:score
      palestra train my_agent.py --nproc 4
      palestra train my_agent.py --detach
      palestra train --env-url http://127.0.0.1:8001 --model.name palestra/tiny --train.max_steps 20
      palestra train --resume runs/my-agent-20260131-101500
      palestra train --resume runs/my-agent-20260131-101500 --train.max_steps 200
      palestra train --resume runs/my-agent-20260131-101500 --from-checkpoint best

    With --agent-cmd each attempt is a process of yours: it finds the model by OPENAI_BASE_URL and OPENAI_API_KEY (or
    the same of ANTHROPIC), and its case on stdin. Without --cases it is asked the demo's questions.

    Every setting of a run is an option, --section.key, with sections such as model, train, rollout, lora, eval and
    checkpoint. `palestra config --keys` lists them all. The command line wins over the YAML
    file, and that over the agent file's own config.
    """
    context = click.get_current_context()
    if nproc is not None and not detach and starts_ranks(nproc, refused={"--dry-run": dry_run, "--env-url": env_url}):
        if resume is not None:
            run = require_run(resume)
            require_trust(run, code_of_run(run.record), trust)  # here, where a question can be answered once
        words = [*(["--trust"] if trust or resume is not None else []), *context.meta[settings.WORDS]]
        raise click.exceptions.Exit(provided("--nproc")([*PALESTRA, "train", *words], nproc))
    own = AgentOptions.take(parameters)
    _refuse_together(own, context.params)
    options = with_model_of_run(settings.from_options(parameters))
    addresses: dict[str, Any] = {"env_url": env_url, "serve_port": serve_port, "wait_limit_s": wait_limit_s}
    if resume is not None:
        max_steps = settings.max_steps_of_resumed(options, config_file)
        run = require_run(resume)
        require_trust(run, code_of_run(run.record), trust)
        if is_first_rank():  # by then the first one may train in it
            refuse_busy(run.path)
        resumed, show = Resume(run.path, from_checkpoint, max_steps), partial(training_display, console)
        return print_outcome(console, *executor.resume(resumed, show, RunRequest(**addresses), agent_file))
    has_env = env is not None or env_url is not None
    request = replace(
        read_settings(config_file, options) if has_env else RunRequest(settings=layer(config_file, options)),
        environment=env,
        agent_file=agent_file,
        agent=own.record(),
        wire=wire or None,
        nproc=nproc or 1,
        **addresses,
    )
    if dry_run:  # load everything in a temporary run folder, and end before the first step
        with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(DryRun):
            executor.train(request, partial(training_display, console, dry_run=True), Path(scratch))
        console.print("ready; nothing was trained (--dry-run)")
        return None
    if not detach:
        return train_in_terminal(request, console, folder)
    request = replace(request, name=Path(env or agent_file or own.cases or "demo").stem)
    executor.check(request)
    request = replace(request, settings={"output_dir": str(Path("runs").absolute()), **request.settings})
    started = RunManager().start(request)
    console.print(f"run {started.run_id} started; this terminal may be closed", highlight=False)
    for action in ("watch", "logs", "stop"):
        console.print(f"  palestra runs {action} {started.run_id}", highlight=False)
    console.print(f"run folder {show_path(started.folder)}", style="dim", highlight=False)
    return started.to_dict()


@contextlib.contextmanager
def training_display(console: Console, config: RunConfig, *, dry_run: bool = False) -> Iterator[Display]:
    """Load torch, and show a training; Ctrl-C prints the command that continues the run with --resume."""
    load_libraries(console, config.model.name, is_needed=config.backend != "tinker")
    display = make_display(console, config.track.log_every)

    def end_dry_run() -> None:
        raise DryRun

    if dry_run:
        display.on_start, display.ends_at_start = end_dry_run, True
    try:
        with sigterm_as_ctrl_c(), display:
            yield display
    except KeyboardInterrupt:
        if display.run_dir is None:
            raise
        click.secho("\nStopped; every finished step is saved. Continue with:", fg="yellow", err=True)
        run = RunFolder(display.run_dir)
        path = shlex.quote(show_path(run.path))
        click.echo(f"  {run.wire_command or f'palestra train --resume {path}'}", err=True)
        if run.last_checkpoint() is not None:
            click.echo(f"or end it there, scored and saved:\n  palestra runs finish {path}", err=True)
        raise click.exceptions.Exit(130) from None


def train_in_terminal(request: RunRequest, console: Console, folder: Path | None = None) -> dict[str, Any]:
    """Execute a run in this process, show its progress, and print its outcome."""
    if request.env_url is not None:
        require_serve_extra()
    return print_outcome(console, *executor.train(request, partial(training_display, console), folder))


def starts_ranks(nproc: int, refused: Mapping[str, Any]) -> bool:
    """Whether this process only starts the ranks; False in a rank itself, and for one."""
    for option, value in refused.items():
        if value and nproc > 1:
            raise SettingError(f"--nproc {nproc} trains in this terminal; leave out --nproc, or {option}")
    place = RankVariables.of_environment()
    if place is not None and place.local_size != nproc:
        raise SettingError(f"--nproc {nproc}: torchrun has started {place.local_size} ranks here; leave --nproc out")
    return place is None and nproc > 1


def _refuse_together(own: AgentOptions, parameters: Mapping[str, Any]) -> None:
    names = ("agent_file", "env", "env_url", "resume", "detach", "folder")
    agent_file, env, env_url, resume, detach, folder = (parameters[name] for name in names)
    if own.are_set and (env or env_url or resume):
        raise SettingError(f"{own.arguments()[0]} says what to train; it does not go with --env, --env-url, --resume")
    if env is not None and agent_file is not None:
        raise SettingError(f"train on the agent file {agent_file} or on the environment {env}, not on both")
    if env_url is not None and agent_file is not None:
        raise SettingError(f"train on what comes from {env_url} or on {agent_file}, not on both")
    if parameters["from_checkpoint"] is not None and resume is None:
        raise SettingError("--from-checkpoint chooses where a run continues; name the run with --resume")
    if parameters["dry_run"] and (detach or resume or env_url or folder):
        raise SettingError("--dry-run is for a new run in this terminal; leave the other options out")
    if detach and (resume or env_url or folder):
        raise SettingError("--detach starts a new run in a folder of its own; `palestra runs resume` continues one")


@settings.command_of_run("sft")
@click.argument("traces")
@click.option("--agent", "agent_file", metavar="FILE", help="Score this agent file's held-out cases before and after.")
@click.option("--folder", type=PATH, help="Use this as the run folder, instead of a new one.")
def sft(
    traces: str,
    agent_file: str | None,
    folder: Path | None,
    config_file: Path | None,
    console: Console,
    **parameters: Any,
) -> dict[str, Any]:
    """Train a model on conversations: cross-entropy on what the assistant says in them.

    TRACES is a file of JSON lines (OpenAI, TRL or Anthropic; what `palestra record` writes), or a run, whose
    passed rollouts are learned.

    \b
    Examples:
      palestra sft traces.jsonl --model.name Qwen/Qwen3-0.6B
      palestra sft traces.jsonl --model.name Qwen/Qwen3-0.6B --agent my_agent.py --stages.sft_epochs 2
      palestra sft k3f9 --model.name palestra/tiny --agent my_agent.py
      palestra train my_agent.py --stages sft:traces.jsonl,grpo        continue with reinforcement learning

    Continue a run that was stopped with `palestra train --resume RUN`.
    """
    options = with_model_of_run(settings.from_options(parameters))
    run = None if Path(traces).exists() else find_run(traces)
    options |= {"stages.plan": "sft", "stages.traces": str(run.folder.path if run else Path(traces).absolute())}
    request = RunRequest(agent_file=agent_file, settings=layer(config_file, options), name=Path(traces).stem)
    return train_in_terminal(request, console, folder)


@settings.command_of_run("eval")
@click.argument("agent_file", required=False)
@click.option(
    "--split",
    type=click.Choice(["held-out", "train", "all"]),
    default="held-out",
    show_default=True,
    help="Which cases: those that training holds out, those that it trains on, or all.",
)
@out_option("Write each attempt as a JSON line when it ends, so that the evaluation can be resumed.")
@click.option("--resume", is_flag=True, help="Continue the evaluation in the file of --out; its attempts are kept.")
@agent_options
def eval_command(
    agent_file: str | None,
    split: str,
    out: Path | None,
    resume: bool,
    config_file: Path | None,
    console: Console,
    **parameters: Any,
) -> dict[str, Any]:
    """Score an agent on its held-out cases, without training.

    \b
    Examples:
      palestra eval
      palestra eval my_agent.py
      palestra eval my_agent.py --model.name k3f9      the model of a run: its id, name or folder; k3f9@50: a checkpoint
      palestra eval --agent-cmd "python my_agent.py" --cases cases.jsonl --measure score.py:score
      palestra eval my_agent.py --eval.samples_per_case 4 --eval.temperature 0.8
      palestra eval my_agent.py --out scores.jsonl              then, after an interruption, with --resume

    `palestra config --keys` lists every setting.
    """
    if resume and out is None:
        raise SettingError("--resume needs the file of the evaluation: --out FILE --resume")
    own = AgentOptions.take(parameters)
    options = with_model_of_run(settings.from_options(parameters))
    file, agent, config = own.open(agent_file, settings.layer(config_file, options))
    suite, cases, split = _cases(file, split)
    load_libraries(console, config.model.name)
    measures = file.suite.measures if file.measures is None else file.measures  # for held-out cases, too
    how: dict[str, Any] = {"reward_weights": file.reward_weights, "out": out, "resume": resume}
    with make_display(console, config.track.log_every) as display:
        report = evaluate(agent, suite, measures, config=config, watcher=display, **how)
    facts = RunFacts(config, "program" if isinstance(agent, ProgramAgent) else "agent")
    print_evaluation(console, f"{agent.name}, {cases}", report, facts)
    return {
        "pass_rate": report.pass_rate.rate,
        "interval": [report.pass_rate.low, report.pass_rate.high],
        "measures": {m.name: m.pass_rate.rate for m in report.measures},
        "capability": capability_of(report).to_dict(),
        "split": split,
        "cases": len({rollout.problem_id for rollout in report.rollouts}),
        "seconds": round(report.seconds, 2),
    }


def _cases(file: AgentFile, split: str) -> tuple[EvalSuite, str, str]:
    """The cases of a split, how they are called, and the split that they are; a share is split off as in training."""
    train, held = hold_out(file.suite, file.held_out)
    if split == "held-out" and held is not None:
        return held, f"{len(held)} held-out cases (--split all: also the {len(train)} trained on)", split
    if split != "all":
        none = "" if split == "train" else "; none are held out"
        return train, f"the {len(train)} cases that are trained on{none}", "train"
    apart = f", {len(train)} of them trained on" if len(train) < len(file.suite) else ", which are trained on"
    return file.suite, f"all {len(file.suite)} cases of the suite{apart}", split
