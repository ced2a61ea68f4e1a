"""`palestra export`: a trained model as a Hugging Face folder, a GGUF file or an Ollama model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.faces.cli import settings

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.gguf.write import Progress


@click.command("export")
@click.argument("run_or_model")
@click.option("--to", "kind", required=True, type=click.Choice(["hf", "gguf", "ollama"]), help="The format.")
@click.option("--type", "type_", default="q8_0", show_default=True, help="f32, f16, bf16, q8_0; others by llama.cpp.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder, or the .gguf file. [default: in the run]")
@click.option("--name", help="Its name in Ollama, and in the GGUF file. [default: the run's]")
@click.option("--llama-cpp", metavar="FOLDER", help="Where llama-quantize is. [env: LLAMA_CPP_PATH]")
@click.option("--json", "as_json", is_flag=True, help="End stdout with one line of JSON; all else goes to stderr.")
@settings.debug_option
def command(
    run_or_model: str,
    kind: str,
    type_: str,
    out: Path | None,
    name: str | None,
    llama_cpp: str | None,
    as_json: bool,
) -> None:
    """Export a run's model, or any other, as a Hugging Face folder, a GGUF file or an Ollama model.

    RUN is a run's id, name or folder.

    \b
    palestra export k3f9 --to gguf
    palestra export runs/my-agent-20260131-101500 --to ollama --name my-agent
    palestra export palestra/tiny --to gguf --type f16 --out tiny.gguf

    An adapter is merged into its base model.
    """
    from rich.console import Console

    from palestra.faces.cli.common import load_libraries
    from palestra.faces.cli.find_run import model_of

    console = Console(stderr=as_json)
    model, folder = model_of(run_or_model)
    load_libraries(console, model)
    if kind == "hf":
        made = _hf(console, model, out or folder / "hf")
    else:
        made = _gguf_or_ollama(console, kind, model, folder, type_, out, name, llama_cpp)
    if as_json:
        click.echo(json.dumps(made))


def _hf(console: Console, model: str, folder: Path) -> dict[str, Any]:
    from palestra.export.hf import to_hf

    with console.status("saving …"):
        to_hf(model, folder)
    console.print(f"{folder}", soft_wrap=True)
    return {"to": "hf", "path": str(folder)}


def _gguf_or_ollama(
    console: Console,
    kind: str,
    model: str,
    folder: Path,
    type_: str,
    out: Path | None,
    name: str | None,
    llama_cpp: str | None,
) -> dict[str, Any]:
    from palestra.export.gguf import to_gguf
    from palestra.export.ollama import to_ollama
    from palestra.export.source import open_source

    with console.status("opening the model …"):
        source = open_source(model, name)
    if kind == "gguf":
        path = out or folder / f"{source.name}-{type_.lower()}.gguf"
        with _bar(console, path.name) as progress:
            to_gguf(source, path, type=type_, llama_cpp=llama_cpp, progress=progress)
        console.print(f"{path} ({path.stat().st_size / 2**20:,.1f} MiB)", soft_wrap=True)
        return {"to": "gguf", "path": str(path), "type": type_.lower()}
    with _bar(console, source.name) as progress:
        made = to_ollama(
            source, source.name, out or folder / "ollama", type=type_, llama_cpp=llama_cpp, progress=progress
        )
    console.print(f"{made.gguf}\n{made.modelfile}", soft_wrap=True)
    next_step = f"Chat with it:  ollama run {made.name}" if made.created else f"Where Ollama is, run:  {made.command}"
    console.print(next_step, soft_wrap=True)
    files = {"path": str(made.gguf), "modelfile": str(made.modelfile)}
    return {"to": "ollama", "name": made.name, **files, "created": made.created, "command": made.command}


@contextmanager
def _bar(console: Console, label: str) -> Iterator[Progress]:
    """A progress bar for the bytes written."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn(label), BarColumn(), DownloadColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
