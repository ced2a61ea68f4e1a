"""Settings on the command line: of a run (`--train.learning_rate 2e-5`), of an environment (`--env.size 5`), of an
OpenAI-style endpoint (`--openai.model_name m`)."""

from __future__ import annotations

import json
import shutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo
from rich.console import Console

from palestra.agent_source import open_agent_file
from palestra.cli.common import PATH, print_sections, returns_data, returns_data_at_end
from palestra.core.config import (
    REMOVED_SETTINGS,
    RunConfig,
    flatten,
    load_yaml,
    read_yaml_config,
    translate,
    unknown_setting,
)
from palestra.core.errors import SettingError
from palestra.core.extras import provided
from palestra.runs.request import RunRequest

PREFIXES = ("env", "openai")
ENV_OPTIONS = "[OPTIONS] [--env.KEY VALUE]… [--openai.KEY VALUE]… [--SECTION.KEY VALUE]…"
_META = "palestra.prefixed"
WORDS = "palestra.words"  # the words after the command, to start it again
_HELP = {
    "model.name": "A hub id, a folder, a .gguf file, or a run: its id, name or folder; RUN@50 is a checkpoint.",
    "seed": "The same seed and settings give the same run.",
    "backend": "Where the model is trained: local, ray (actors of a Ray cluster sample), or tinker.",
    "output_dir": "Where run folders are made.",
    "stages.plan": "Stages in order, such as sft:traces.jsonl,rft,grpo; auto chooses them (docs/warm_start.md).",
    "stages.traces": "For an sft stage: conversations as JSON lines, or a run whose passed rollouts are learned.",
    "stages.teacher": "For an sft stage: URL of a stronger model that plays the agent (with --teacher-model NAME).",
}
_SHORT = {
    "model.name": ("--model",),
    "stages.plan": ("--stages", "--warm-start"),
    "stages.traces": ("--traces",),
    "stages.teacher": ("--teacher",),
    "stages.teacher_model": ("--teacher-model",),
}


def command_of_run(
    name: str, returns: Callable[..., Any] = returns_data_at_end, **attributes: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with --json, --config and an option for every setting; those in sections are hidden from --help."""
    usual = {"options_metavar": "[OPTIONS] [--SECTION.KEY VALUE]…", "context_settings": {"max_content_width": 100}}

    def decorate(function: Callable[..., Any]) -> click.Command:
        command = click.command(name, **usual | attributes)(returns(function))
        config = click.Option(["--config", "config_file"], type=PATH, metavar="FILE", help="Settings from YAML.")
        command.params.append(config)
        for key in RunConfig.settings():
            names = [f"--{key}", *_SHORT.get(key, ()), _parameter(key)]
            command.params.append(click.Option(names, metavar="VALUE", hidden=key not in _HELP, help=_HELP.get(key)))
        for key in REMOVED_SETTINGS:
            command.params.append(click.Option([f"--{key}", _parameter(key)], hidden=True))
        return command

    return decorate


def from_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on the command line, by their dotted names, from all parameters of a command."""
    for key in REMOVED_SETTINGS:
        if parameters.get(_parameter(key)) is not None:
            raise SettingError(f"--{unknown_setting(key, ())}")
    settings = {
        key: read(info, text)
        for key, info in RunConfig.settings().items()
        if (text := parameters.get(_parameter(key))) is not None
    }
    return settings | (_split_plan(str(settings["stages.plan"])) if "stages.plan" in settings else {})


def _split_plan(plan: str) -> dict[str, str]:
    """
    >>> _split_plan("sft:traces.jsonl,rft,grpo")
    {'stages.plan': 'sft,rft,grpo', 'stages.traces': 'traces.jsonl'}
    """
    stages = [stage.strip().partition(":") for stage in plan.split(",")]
    files = [file for _, _, file in stages if file]
    if len(files) > 1:
        raise SettingError(f"--stages {plan} names {len(files)} files; put the conversations into one")
    traces = {"stages.traces": files[0]} if files else {}
    return {"stages.plan": ",".join(name for name, _, _ in stages)} | traces


def max_steps_of_resumed(options: Mapping[str, Any], config_file: Path | None) -> int | None:
    """train.max_steps, the only setting of a resumed run that may change; None leaves it as it is."""
    others = [f"--{key}" for key in options if key != "train.max_steps"] + (["--config"] if config_file else [])
    if others:
        raise SettingError(
            f"{', '.join(others)}: a resumed run keeps its own settings, except for --train.max_steps. "
            "Leave this out, or start a new run without --resume"
        )
    if "train.max_steps" not in options:
        return None
    if options["train.max_steps"] is None:
        raise SettingError("--train.max_steps none: say how many steps the resumed run will have, or leave it out")
    return RunConfig().with_settings({"train.max_steps": options["train.max_steps"]}).train.max_steps


def read(info: FieldInfo, text: str) -> Any:
    """Convert an option's text for RunConfig: `none` is None, commas separate a list's items, objects are JSON."""
    is_union = typing.get_origin(info.annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(info.annotation) if is_union else (info.annotation,)
    is_list = any(typing.get_origin(part) is list for part in parts)
    if text.lower() in ("none", "null"):
        if types.NoneType in parts:
            return None
        if is_list:
            return []
    if is_list:
        return [part.strip() for part in text.split(",") if part.strip()]
    if typing.get_origin(info.annotation) is dict:
        with suppress(ValueError):  # RunConfig says what was expected
            return json.loads(text)
    return text


def describe(key: str, info: FieldInfo) -> tuple[str, str]:
    """`key = default`, and the description with the values to choose from."""
    texts = (info.description or "", " | ".join(_choices(info.annotation)))
    default = info.get_default(call_default_factory=True)
    return f"{key} = {show(default)}", "; ".join(filter(None, texts))


def _choices(kind: Any) -> list[str]:
    """The texts of a Literal, also inside of a union or a list."""
    return [kind] if isinstance(kind, str) else [text for part in typing.get_args(kind) for text in _choices(part)]


def show(value: Any) -> str:
    """A setting's value as it is typed on the command line."""
    match value:
        case None | []:
            return "none"
        case dict():
            return json.dumps(value)
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


class EnvCommand(click.Command):
    """A command that accepts any `--env.x v` and `--openai.x v`; the environment checks them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        ctx.meta[_META], rest = split_prefixed(args)
        return super().parse_args(ctx, rest)


def split_prefixed(args: Sequence[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """
    >>> split_prefixed(["a.py", "--env.size", "5", "--openai.model=m", "--json"])
    ({'env': {'size': '5'}, 'openai': {'model': 'm'}}, ['a.py', '--json'])
    """
    prefixed: dict[str, dict[str, str]] = {prefix: {} for prefix in PREFIXES}
    rest: list[str] = []
    words = iter(args)
    for word in words:
        prefix, dot, name = word.removeprefix("--").partition(".")
        if not (word.startswith("--") and dot and prefix in PREFIXES):
            rest.append(word)
            continue
        name, equals, value = name.partition("=")
        if not equals:
            following = next(words, None)
            if following is None:
                raise click.UsageError(f"Option '--{prefix}.{name}' requires an argument.")
            value = following
        prefixed[prefix][name] = value
    return prefixed, rest


def read_settings(config_file: Path | None, options: dict[str, Any]) -> RunRequest:
    """A request with the settings of the YAML file, overlaid by those of the command line; `options` are the run's."""
    sections = load_yaml(config_file) if config_file else {}
    typed = click.get_current_context().meta.get(_META, {})
    prefixed = {}
    for prefix in PREFIXES:
        section = sections.pop(prefix, None) or {}
        if not isinstance(section, dict):
            raise SettingError(f"{config_file}: {prefix!r} is {section!r}; expected a section with names and values")
        prefixed[prefix] = {**section, **typed.get(prefix, {})}
    settings = {**translate(flatten(sections), str(config_file)), **options}
    return RunRequest(settings=settings, env_settings=prefixed["env"], server_settings=prefixed["openai"])


def layer(config_file: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run: of the YAML file, overlaid by those of the command line."""
    return {**(read_yaml_config(config_file) if config_file else {}), **options}


@command_of_run("config", returns_data)
@click.argument("agent_file", required=False)
@click.option("--keys", is_flag=True, help="List every setting with its default and description.")
@click.option("--locked", is_flag=True, help="List the settings that an LLM agent may not change here, and its limits.")
def config_command(
    agent_file: str | None, config_file: Path | None, keys: bool, locked: bool, console: Console, **parameters: Any
) -> dict[str, Any]:
    """Print the settings that `palestra train` would use, as YAML that `--config` reads back.

    \b
    palestra config my_agent.py > run.yaml      write them down, then edit
    palestra config my_agent.py --lora.r 8      with those of your file and of the command line
    palestra config --keys                      every setting with its default and description
    palestra config --locked                    those that agents may not change, by ./palestra.yaml or PALESTRA_SITE
    """
    if locked:
        data, sections = provided("config --locked")()
        print_sections(console, sections)
        return data
    if keys:
        every = RunConfig.settings().items()
        sections = (
            (section or "run", [describe(key, info) for key, info in members])
            for section, members in groupby(every, lambda setting: setting[0].rpartition(".")[0])
        )
        print_sections(console, sections, width=min(shutil.get_terminal_size().columns, 120), column=46)
        return {
            key: {"default": info.get_default(call_default_factory=True), "about": info.description or ""}
            for key, info in every
        }
    import yaml

    _, _, config = open_agent_file(agent_file, layer(config_file, from_options(parameters)))
    data = config.model_dump(mode="json")
    console.out(yaml.safe_dump(data, sort_keys=False), end="", highlight=False)
    return data
