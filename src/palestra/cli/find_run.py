"""Runs and models named on the command line, by id, name or folder; consent to run code that a foreign run names.

A run folder is your own if the index of runs in PALESTRA_HOME lists this very folder: `palestra train` and the Python
API list every run that they start. Any other folder is foreign: a copy, a download, a colleague's run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from palestra.core.errors import InputError, NotAllowedError, NotFoundError, SettingError, StateError, did_you_mean
from palestra.core.run_folder import RunFolder, step_of
from palestra.core.text import show_path, visible

if TYPE_CHECKING:
    from palestra.runs.index import Row
    from palestra.runs.reader import Run, RunReader

trust_option = click.option(
    "--trust", is_flag=True, help="Run code that a run folder from elsewhere names, without asking."
)
_DEMOS = (None, "demo", "palestra.demo")  # agents that come with Palestra
RUNS = Path("runs")
_MAX_LISTED = 5


class FoundRun(NamedTuple):
    """A run on disk; `run_id` is None if the index does not list it."""

    folder: RunFolder
    run_id: str | None


def find_run(word: str, *, or_model: bool = False) -> FoundRun | None:
    """The run that is meant by its folder (or a model or checkpoint in it), the folder's name in ./runs or in the
    index, its id or an unambiguous beginning of it, or its name; `@STEP` after it names a checkpoint.

    None if there is none; several matches raise PalestraError. With `or_model`, an existing path outside of runs is a
    model, also if a run has the same name.
    """
    rows = _index_rows()
    word = word.partition("@")[0]
    is_model = or_model and bool(word) and Path(word).expanduser().exists()
    for path in _folders(word) if is_model else [*_folders(word), RUNS / word]:
        names = {str(path.resolve()), str(path.absolute())}
        row = next((row for row in rows if row.folder in names), None)
        if row is not None or RunFolder(path).has_begun:
            return FoundRun(RunFolder(path), None if row is None else row.run_id)
    if is_model:
        return None
    matches = (
        [row for row in rows if row.run_id == word]
        or [row for row in rows if word and row.run_id.startswith(word)]
        or [row for row in rows if Path(row.folder).name == word]
        or [row for row in rows if row.name == word]
    )
    if len(matches) > 1:
        ids = ", ".join(row.run_id for row in matches[:_MAX_LISTED])
        raise SettingError(f"{len(matches)} runs match {word!r}; give one id: {ids}")
    return FoundRun(RunFolder(Path(matches[0].folder)), matches[0].run_id) if matches else None


def require_run(word: str) -> RunFolder:
    """The folder of a run that has begun; an error lists the most recent runs of ./runs."""
    run = find_run(word)
    if run is not None or Path(word).is_dir():
        return RunFolder.open(Path(word) if run is None else run.folder.path)
    if not (recent := recent_runs()):
        raise NotFoundError(f"there is no run {word}, and ./{RUNS} has none; `palestra train` starts one")
    listing = "".join(f"\n  {path}" for path in recent)
    raise NotFoundError(f"there is no run {word}. The most recent ones in ./{RUNS} are:{listing}")


def require_run_id(word: str) -> str:
    """The id of a run in the index; a word that matches none is returned as it is, for the index to refuse."""
    run = find_run(word)
    if run is None:
        return word
    if run.run_id is None:
        raise NotFoundError(
            f"{run.folder.path} is not in the index of runs; "
            f"`palestra train --resume {shlex.quote(str(run.folder.path))}` continues it"
        )
    return run.run_id


def run_of(reader: RunReader, word: str) -> Run:
    """The run that is meant, as it stands; also one in a folder that the index does not list."""
    run = find_run(word)
    if run is not None and run.run_id is None:
        return reader.of_folder(RunFolder.open(run.folder.path.absolute()))
    return reader.get(word if run is None or run.run_id is None else run.run_id)


def model_of(word: str) -> tuple[str, Path]:
    """The model that is meant: of a run, of one of its checkpoints (RUN@50, RUN@best or its folder), or the model of
    this name; and the folder for what is exported from it. A run without a model gives its newest checkpoint."""
    run = find_run(word, or_model=True)
    if run is None:
        _explain_missing(word)
        return word, Path("export")
    folder = RunFolder.open(run.folder.path)
    _, _, name = word.partition("@")
    if name:
        return str(folder.checkpoint(name)), folder.export
    if (path := Path(word).expanduser()).parent.resolve() == folder.checkpoints.resolve():
        return str(folder.checkpoint(path.name)), folder.export
    if folder.model.is_dir():
        return str(folder.model), folder.export
    last = folder.last_checkpoint()
    if last is None:
        raise StateError(
            f"the run {folder.path} has no trained model and no checkpoint yet; continue it with: "
            f"palestra train --resume {shlex.quote(str(folder.path))}"
        )
    click.echo(f"{show_path(folder.path)} was not finished; this is its checkpoint of step {step_of(last)}", err=True)
    return str(last), folder.export


def _explain_missing(word: str) -> None:
    """Raise, or print a note, if a word that is looked up as a model's name was probably meant as a run."""
    if word.endswith(".py"):
        raise InputError(f"{word} is a Python file, no run and no model; `palestra train {word}` makes a run of it")
    if "/" in word or word.endswith(".gguf") or Path(word).expanduser().exists():
        return
    names = [name for row in _index_rows() for name in (row.run_id, row.name, Path(row.folder).name)]
    if near := did_you_mean(word, [*names, *(path.name for path in recent_runs())]):
        raise NotFoundError(f"there is no run {word!r}.{near} `palestra runs list` shows all")
    click.echo(f"there is no run {word!r}; looking for a model of this name", err=True)


def with_model_of_run(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a command line in which model.name, and the models of agent.roles, may be runs."""
    if "model.name" in options:
        options = options | {"model.name": model_of(options["model.name"])[0]}
    if isinstance(roles := options.get("agent.roles"), dict):
        known = {"train", "start", "checkpoint"}
        models = {k: v if v in known or "://" in str(v) else model_of(str(v))[0] for k, v in roles.items()}
        options = options | {"agent.roles": models}
    return options


def recent_runs() -> list[Path]:
    """The newest run folders of ./runs, newest first."""
    folders = [run for run in map(RunFolder, RUNS.glob("*")) if run.has_begun]
    folders.sort(key=lambda run: run.record_file.stat().st_mtime, reverse=True)
    return [run.path for run in folders[:_MAX_LISTED]]


def run_argument(many: bool = False, required: bool = True) -> Any:
    """The argument RUN, or RUN…, of a command; the shell completes run ids."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        rows = [row for row in _index_rows() if row.run_id.startswith(incomplete)]
        return [CompletionItem(row.run_id, help=f"{row.name} {row.state}") for row in rows]

    if many:
        return click.argument("runs", metavar="RUN…", nargs=-1, required=required, shell_complete=complete)
    return click.argument("run", metavar="RUN", shell_complete=complete)


def _folders(word: str) -> Iterator[Path]:
    path = Path(word).expanduser()
    yield path
    if path.parent.name == RunFolder(path).checkpoints.name:
        yield path.parent.parent
    if path == RunFolder(path.parent).model:
        yield path.parent


def _index_rows() -> list[Row]:
    """The rows of the index; none if it cannot be read."""
    try:
        from palestra.runs.index import Index, palestra_home

        return Index(palestra_home(), create=False).rows()
    except OSError:
        return []


def require_trust(folder: RunFolder, code: Sequence[str], trust: bool) -> None:
    """Ask on a terminal, unless the folder is the user's own, or names no code; PalestraError without consent."""
    if trust or not code or is_own(folder):
        return
    listing = "".join(f"\n  {visible(line)}" for line in code)
    reason = f"{folder.path} is not one of your runs, and this would use, with your rights:{listing}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotAllowedError(f"{reason}\nread it first; if you trust it, repeat the command with --trust")
    if not click.confirm(f"{reason}\nDo you trust it?", default=False, err=True):
        raise NotAllowedError("nothing was run, because the folder is not trusted")


def is_own(folder: RunFolder) -> bool:
    """Whether the index of runs lists exactly this folder."""
    from palestra.runs.reader import RunReader

    try:
        return RunReader().lists(RunFolder(folder.path.absolute()))
    except OSError:
        return False


def code_for_tools(record: Mapping[str, Any]) -> list[str]:
    """Code that gives a run its tools and problems: an environment or an agent file; none if it comes with Palestra."""
    from palestra.envs.discover import FAMILY, LIBRARY, in_file, python_files

    environment = record.get("environment")
    if isinstance(environment, Mapping):
        settings = environment.get("settings") or {}
        name = str(environment.get("name"))
        # an environment of Palestra's library, whatever files there are
        library = (env.name for path in python_files(LIBRARY) for env in in_file(path))
        is_built_in = name.startswith(f"{FAMILY}/") or name in library
        if is_built_in and isinstance(settings, Mapping) and "allow_unsandboxed" not in settings:
            return []
        return [f"the environment {name} with the settings {dict(settings) if settings else 'of its file'}"]
    source = record.get("source")
    is_here = source not in _DEMOS and Path(str(source)).exists()  # the file of another machine cannot run
    return [f"the agent file {source}"] if is_here else []


def code_of_run(record: Mapping[str, Any]) -> list[str]:
    """All that a resumed run may execute or contact. Its settings name addresses, trackers and folders too."""
    others = [f"{name}: {record[name]}" for name in ("agent_options", "scored_by", "atropos") if record.get(name)]
    config = "its config.yaml, which names addresses, folders and functions, and its checkpoints"
    return [*code_for_tools(record), *others, config]
