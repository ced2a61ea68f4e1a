"""Settings that only an environment knows, on the command line (`--env.size 5`) and in YAML (`env: {size: 5}`)."""

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
    """A command that takes any `--env.x v` and `--openai.x v`; what they may be is the environment's to say."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_META], rest = split_prefixed(args)
        return super().parse_args(ctx, rest)


def split_prefixed(args: Sequence[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """
    >>> split_prefixed(["a.py", "--env.size", "5", "--openai.model=m", "--json"])
    ({'env': {'size': '5'}, 'openai': {'model': 'm'}}, ['a.py', '--json'])
    """
    taken: dict[str, dict[str, str]] = {prefix: {} for prefix in PREFIXES}
    rest: list[str] = []
    words = iter(args)
    for word in words:
        prefix, dot, name = word.removeprefix("--").partition(".")
        if not (word.startswith("--") and dot and prefix in PREFIXES):
            rest.append(word)
            continue
        name, equals, value = name.partition("=")
        if not equals:
            given = next(words, None)
            if given is None:
                raise click.UsageError(f"Option '--{prefix}.{name}' requires an argument.")
            value = given
        taken[prefix][name] = value
    return taken, rest


def read_settings(config_file: Path | None, given: dict[str, Any]) -> EnvSettings:
    """The YAML file's settings, overlaid by the command line's; `given` are those of the run."""
    from palestra.core.errors import PalestraError
    from palestra.core.yaml_config import flatten, load_yaml, translate

    sections = load_yaml(config_file) if config_file else {}
    apart = {prefix: sections.pop(prefix, None) or {} for prefix in PREFIXES}
    for prefix, section in apart.items():
        if not isinstance(section, dict):
            raise PalestraError(f"{config_file}: {prefix!r} is {section!r}; expected a section with names and values")
    typed = click.get_current_context().meta[_META]
    run = {**translate(flatten(sections), str(config_file)), **given}
    return EnvSettings({**apart["env"], **typed["env"]}, {**apart["openai"], **typed["openai"]}, run)
