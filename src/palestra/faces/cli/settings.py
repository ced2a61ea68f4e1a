"""Every setting of RunConfig as a command-line option: `--train.learning_rate 2e-5`."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError

_HELP = {"seed": "The same seed and settings give the same run.", "output_dir": "Where run folders are made."}


def options(command: click.Command) -> click.Command:
    """Add an option for every setting. Those in sections are hidden from --help: there are too many."""
    for key in RunConfig.settings():
        names = [f"--{key}", _parameter(key)]
        command.params.append(click.Option(names, metavar="VALUE", hidden="." in key, help=_HELP.get(key)))
    return command


def from_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on the command line, by their dotted names, from all parameters of a command."""
    return {
        key: read(info, text)
        for key, info in RunConfig.settings().items()
        if (text := parameters.get(_parameter(key))) is not None
    }


def max_steps_of_resumed(options: Mapping[str, Any], config_file: Path | None) -> int | None:
    """train.max_steps, the only setting of a resumed run that may change; None leaves it as it is."""
    others = [f"--{key}" for key in options if key != "train.max_steps"] + (["--config"] if config_file else [])
    if others:
        raise PalestraError(
            f"{', '.join(others)}: a resumed run keeps its own settings, except for a larger --train.max_steps. "
            "Leave this out, or start a new run without --resume"
        )
    if "train.max_steps" in options and options["train.max_steps"] is None:
        raise PalestraError("--train.max_steps none: say how many steps the resumed run will have, or leave it out")
    return options.get("train.max_steps")


def read(info: FieldInfo, text: str) -> Any:
    """Convert an option's text for RunConfig: `none` becomes None, commas separate the items of a list."""
    parts = typing.get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
    is_list = any(typing.get_origin(part) is list for part in parts)
    if text.lower() in ("none", "null"):
        if types.NoneType in parts:
            return None
        if is_list:
            return []
    if is_list:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--debug`: show a traceback instead of a one-line error."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["PALESTRA_DEBUG"] = "1"

    return click.option(
        "--debug", is_flag=True, is_eager=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )(command)


def describe(key: str, info: FieldInfo) -> tuple[str, str, str]:
    """(name, default, description) of one setting, for a listing."""
    default = info.get_default(call_default_factory=True)
    values = [v for part in _parts(info.annotation) for v in typing.get_args(part) if isinstance(v, str)]
    choices = " | ".join(values)
    text = "; ".join(part for part in (info.description or "", choices) if part)
    return key, show(default), text


def show(value: Any) -> str:
    """A setting's value as it is typed on the command line."""
    match value:
        case None | []:
            return "none"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case list():
            return ",".join(map(str, value))
        case _:
            return str(value)


def _parameter(key: str) -> str:
    return key.replace(".", "__")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _parts(kind: Any) -> list[Any]:
    """The member types of a union or a list, or the type itself."""
    if _is_union(kind) or typing.get_origin(kind) is list:
        return [part for inner in typing.get_args(kind) for part in _parts(inner)]
    return [kind]
