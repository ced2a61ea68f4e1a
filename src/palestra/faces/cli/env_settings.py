"""Settings of an environment, on the command line (`--env.size 5`) and in YAML (`env: {size: 5}`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

PREFIXES = ("env", "openai")
_META = "palestra.prefixed"


@dataclass(frozen=True)
class EnvSettings:
    """The environment's own settings, those of an OpenAI-style endpoint, and those of the run."""

    env: dict[str, Any] = field(default_factory=dict)
    openai: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


class EnvCommand(click.Command):
    """A command that accepts any `--env.x v` and `--openai.x v`; the environment checks them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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


def read_settings(config_file: Path | None, options: dict[str, Any]) -> EnvSettings:
    """The settings of the YAML file, overlaid by those of the command line; `options` are the run's."""
    from palestra.core.errors import PalestraError
    from palestra.core.yaml_config import flatten, load_yaml, translate

    sections = load_yaml(config_file) if config_file else {}
    prefixed = {prefix: sections.pop(prefix, None) or {} for prefix in PREFIXES}
    for prefix, section in prefixed.items():
        if not isinstance(section, dict):
            raise PalestraError(f"{config_file}: {prefix!r} is {section!r}; expected a section with names and values")
    typed = click.get_current_context().meta[_META]
    run = {**translate(flatten(sections), str(config_file)), **options}
    return EnvSettings({**prefixed["env"], **typed["env"]}, {**prefixed["openai"], **typed["openai"]}, run)
