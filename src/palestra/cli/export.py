"""`palestra export`: a trained model as a Hugging Face folder, a GGUF file or an Ollama model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from palestra.cli.common import debug_option, json_line_option, load_libraries
from palestra.cli.find_run import model_of
from palestra.core.files import slug
from palestra.train.progress import task

if TYPE_CHECKING:
    from palestra.models.export.source import ModelSource
    from palestra.models.gguf.write import Progress


@click.command("export")
@click.argument("run_or_model")
@click.option("--to", "kind", required=True, type=click.Choice(["hf", "gguf", "ollama"]), help="The format.")
@click.option("--type", "type_", default="q8_0", show_default=True, help="f32, f16, bf16, q8_0; others by llama.cpp.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder, or the .gguf file. [default: in the run]")
@click.option("--name", help="Its name in Ollama, and in the GGUF file. [default: the run's]")
@click.option("--llama-cpp", metavar="FOLDER", help="Where llama-quantize is. [env: LLAMA_CPP_PATH]")
@json_line_option
@debug_option
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

    RUN is a run's id, name or folder; RUN@50 or RUN@best is one of its checkpoints.

    \b
    palestra export k3f9 --to gguf
    palestra export runs/my-agent-20260131-101500 --to ollama --name my-agent
    palestra export palestra/tiny --to gguf --type f16 --out tiny.gguf

    An adapter is merged into its base model.
    """
    console = Console(stderr=as_json)
    model, folder = model_of(run_or_model)
    load_libraries(console, model)
    options = {"type": type_, "llama_cpp": llama_cpp}
    match kind:
        case "hf":
            made = _to_hf(console, model, out or folder / "hf")
        case "gguf":
            made = _to_gguf(console, _open(console, model, name), folder, out, options)
        case _:
            source = _open(console, model, name)
            made = _to_ollama(console, source, out or folder / "ollama" / slug(source.name), options)
    if as_json:
        click.echo(json.dumps({"to": kind, **made}))


def _open(console: Console, model: str, name: str | None) -> ModelSource:
    from palestra.models.export.source import open_source

    with task(console, "opening the model"):
        return open_source(model, name)


def _to_hf(console: Console, model: str, folder: Path) -> dict[str, Any]:
    from palestra.models.export.hf import to_hf

    with task(console, "saving the model"):
        to_hf(model, folder)
    console.print(f"{folder}", soft_wrap=True)
    return {"path": str(folder)}


def _to_gguf(
    console: Console, source: ModelSource, folder: Path, out: Path | None, options: dict[str, Any]
) -> dict[str, Any]:
    from palestra.models.export.gguf import to_gguf

    kind = options["type"].lower()
    path = out or folder / f"{source.name}-{kind}.gguf"
    with _writing(console, path.name) as progress:
        to_gguf(source, path, progress=progress, **options)
    console.print(f"{path} ({path.stat().st_size / 2**20:,.1f} MiB)", soft_wrap=True)
    return {"path": str(path), "type": kind}


def _to_ollama(console: Console, source: ModelSource, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from palestra.models.export.ollama import to_ollama

    with _writing(console, source.name) as progress:
        made = to_ollama(source, source.name, folder, progress=progress, **options)
    console.print(f"{made.gguf}\n{made.modelfile}", soft_wrap=True)
    next_step = f"Chat with it:  ollama run {made.name}" if made.created else f"Where Ollama is, run:  {made.command}"
    console.print(next_step, soft_wrap=True)
    files = {"path": str(made.gguf), "modelfile": str(made.modelfile)}
    return {"name": made.name, **files, "created": made.created, "command": made.command}


@contextmanager
def _writing(console: Console, label: str) -> Iterator[Progress]:
    """The display of a file that is being written, as what is called with the bytes of it."""
    with task(console, label, unit="bytes") as phase:

        def advance(done: int, total: int) -> None:
            phase.total = total
            phase.advance(done)

        yield advance
