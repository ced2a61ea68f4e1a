"""Every setting of a run as a command-line option, made from the one config: `--train.learning_rate 2e-5`."""

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
    """Add an option for every setting. Those of the sections are hidden from --help, which would drown in them."""
    for key in RunConfig.settings():
        names = [f"--{key}", _parameter(key)]
        command.params.append(click.Option(names, metavar="VALUE", hidden="." in key, help=_HELP.get(key)))
    return command


def given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's parameters, the settings that were given, by their dotted names."""
    return {
        key: read(info, text)
        for key, info in RunConfig.settings().items()
        if (text := parameters.get(_parameter(key))) is not None
    }


def only_longer(given: Mapping[str, Any], config_file: Path | None) -> int | None:
    """How long a resumed run shall be, the one setting of it that may change; None: as long as it was to be."""
    others = [f"--{key}" for key in given if key != "train.max_steps"] + (["--config"] if config_file else [])
    if others:
        raise PalestraError(
            f"{', '.join(others)}: a resumed run keeps its own settings, but for a larger --train.max_steps. "
            "Leave this out, or start a new run without --resume"
        )
    if "train.max_steps" in given and given["train.max_steps"] is None:
        raise PalestraError("--train.max_steps none: say how many steps the resumed run shall have, or leave it out")
    return given.get("train.max_steps")


def read(info: FieldInfo, text: str) -> Any:
    """A setting's text as the config takes it: `none` for what may be absent, commas between the parts of a list."""
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
    """`--debug`: a traceback instead of a one-line error."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["PALESTRA_DEBUG"] = "1"

    return click.option(
        "--debug", is_flag=True, is_eager=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )(command)


def describe(key: str, info: FieldInfo) -> tuple[str, str, str]:
    """(name, default, what it is) of one setting, for a listing."""
    default = info.get_default(call_default_factory=True)
    values = [v for part in _parts(info.annotation) for v in typing.get_args(part) if isinstance(v, str)]
    choices = " | ".join(values)
    text = "; ".join(part for part in (info.description or "", choices) if part)
    return key, show(default), text


def show(value: Any) -> str:
    """A setting's value as one would type it."""
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
    """The kinds that a union or a list is made of, or the kind itself."""
    if _is_union(kind) or typing.get_origin(kind) is list:
        return [part for inner in typing.get_args(kind) for part in _parts(inner)]
    return [kind]
