"""`palestra export`: a model as a Hugging Face folder or repository, GGUF file or Ollama model; a run as HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli.common import PATH, load_libraries, returns_data_at_end
from palestra.cli.find_run import find_run, model_of, require_run
from palestra.core.errors import SettingError
from palestra.core.extras import provided
from palestra.core.files import slug, write_text
from palestra.train.progress import task

_FILES = ("--out", "--name")
_OPTIONS = {  # format -> its options
    "hf": _FILES,
    "gguf": _FILES,
    "ollama": _FILES,
    "hub": ("--repo", "--public", "--adapter"),
    "html": ("--out", "--groups"),
}


@click.command("export")
@click.argument("run_or_model")
@click.option("--to", "kind", required=True, type=click.Choice(list(_OPTIONS)), help="Format.")
@click.option("--type", "type_", default="q8_0", show_default=True, help="f32, f16, bf16, q8_0; others by llama.cpp.")
@click.option("--out", type=PATH, help="A folder, or the .gguf or .html file. [default: in the run]")
@click.option("--name", help="Its name in Ollama, and in the GGUF file. [default: the run's]")
@click.option("--repo", metavar="USER/NAME", help="With --to hub: the repository, which is made if it does not exist.")
@click.option("--public", is_flag=True, help="With --to hub: everyone may see a new repository. [default: private]")
@click.option("--adapter", is_flag=True, help="With --to hub: upload the adapter alone instead of the merged model.")
@click.option("--groups", type=click.IntRange(1, 10_000), help="With --to html: how many groups. [default: 50]")
@click.option("--llama-cpp", metavar="FOLDER", help="Where llama-quantize is. [env: LLAMA_CPP_PATH]")
@returns_data_at_end
def command(
    run_or_model: str,
    kind: str,
    type_: str,
    out: Path | None,
    name: str | None,
    repo: str | None,
    public: bool,
    adapter: bool,
    groups: int | None,
    llama_cpp: str | None,
    console: Console,
) -> dict[str, Any]:
    """Export a run's model, or any other, as a Hugging Face folder or repository, a GGUF file or an Ollama model.

    RUN is a run's id, name or folder; RUN@50 or RUN@best is one of its checkpoints.

    \b
    palestra export k3f9 --to gguf
    palestra export runs/my-agent-20260131-101500 --to ollama --name my-agent
    palestra export palestra/tiny --to gguf --type f16 --out tiny.gguf
    palestra export k3f9 --to hub --repo my-name/my-agent
    palestra export k3f9 --to html --out run.html

    An adapter is merged into its base model. A repository of the hub gets a model card with the evaluation. The HTML
    page shows the run: its evaluation, curves, and groups side by side, in one file that needs no network.
    """
    values = {"--groups": groups, "--name": name, "--out": out}
    values |= {"--repo": repo, "--public": public, "--adapter": adapter}
    if others := [option for option, value in values.items() if value and option not in _OPTIONS[kind]]:
        raise SettingError(f"--to {kind} takes no {' and no '.join(others)}; leave out what is of another format")
    if kind == "html":
        run_page, run = provided("--to html"), require_run(run_or_model)
        path = out or run.export / f"{run.path.name}.html"
        with task(console, "writing the page"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, run_page(run, groups))
        _print_file(console, path)
        return {"to": kind, "path": str(path)}
    if kind == "hub":
        if not repo:
            raise SettingError("--to hub needs a repository: --repo USER/NAME")
        provided("--to hub")(repo)
    model, folder = model_of(run_or_model)
    load_libraries(console, model)
    if kind == "hub":
        return {"to": kind, **_to_hub(console, run_or_model, model, str(repo), private=not public, adapter=adapter)}
    if kind == "hf":
        from palestra.models.export.hf import to_hf

        with task(console, "saving the model"):
            to_hf(model, path := out or folder / "hf")
        console.print(f"{path}", soft_wrap=True)
        return {"to": kind, "path": str(path)}
    with task(console, "opening the model"):
        source = provided("a conversion to GGUF")(model, name)
    with task(console, source.name, unit="bytes") as phase:

        def on_progress(done: int, total: int) -> None:
            phase.total = total
            phase.advance(done)

        how: dict[str, Any] = {"type": type_, "llama_cpp": llama_cpp, "progress": on_progress}
        if kind == "gguf":
            path = out or folder / f"{source.name}-{type_.lower()}.gguf"
            provided("--to gguf")(source, path, **how)
        else:
            made = provided("to_ollama")(source, source.name, out or folder / "ollama" / slug(source.name), **how)
    if kind == "gguf":
        _print_file(console, path)
        return {"to": kind, "path": str(path), "type": type_.lower()}
    next_step = f"Chat with it:  ollama run {made.name}" if made.created else f"Where Ollama is, run:  {made.command}"
    console.print(f"{made.gguf}\n{made.modelfile}\n{next_step}", soft_wrap=True)
    files = {"name": made.name, "path": str(made.gguf), "modelfile": str(made.modelfile)}
    return {"to": kind, **files, "created": made.created, "command": made.command}


def _print_file(console: Console, path: Path) -> None:
    console.print(f"{path} ({path.stat().st_size / 2**20:,.1f} MiB)", soft_wrap=True)


def _to_hub(console: Console, word: str, model: str, repo: str, *, private: bool, adapter: bool) -> dict[str, Any]:
    run = find_run(word, or_model=True)
    # the report is of the weights after training, not of a checkpoint
    is_final = run is not None and Path(model).resolve() == run.folder.model.resolve()
    report = run.folder.report() if run and is_final else None
    with task(console, f"uploading to {repo}"):
        made = provided("an upload to the hub")(model, repo, private=private, adapter=adapter, report=report)
    note = " (private, if it is new; --public makes it visible)" if private else ""
    console.print(f"{made.url}{note}", soft_wrap=True)
    return {"repo": made.name, "url": made.url, "private": made.private}
