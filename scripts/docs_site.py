"""Hooks of the documentation site (mkdocs.yml): pages that are made, not written.

The front page is the README; the reference is made from the code at every build, so it is never out of date.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#]+)(#[^)]*)?\)")
sys.path.insert(0, str(ROOT / "src"))


def on_files(files: Files, config: Any) -> Files:
    pages = {
        "index.md": _front_page(),
        "reference/api.md": _api(),
        "reference/cli.md": _commands(),
        "reference/config.md": _settings(),
        "reference/tools.md": _tools(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to folders and to files outside of docs/ become their names: they are in the repository alone."""
    here = Path(page.file.src_uri).parent

    def relink(match: re.Match[str]) -> str:
        _, text, target, _ = match.groups()
        path = os.path.normpath(Path("docs") / here / target)
        if "://" in target or (path.startswith("docs/") and not (ROOT / path).is_dir()):
            return match.group(0)
        return f"`{path}`" if text == path else f"{text} (`{path}`)"

    return LINK.sub(relink, markdown)


def _front_page() -> str:
    """README.md, whose links start at the repository's root."""

    def relink(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if "://" in target:
            return match.group(0)
        inside = target.startswith("docs/")
        return f"{image}[{text}]({target.removeprefix('docs/') if inside else '../' + target}{anchor or ''})"

    return LINK.sub(relink, (ROOT / "README.md").read_text(encoding="utf-8"))


def _api() -> str:
    palestra = importlib.import_module("palestra")
    lines = ["# Python", "", "Every name here is imported from `palestra`."]
    for name in palestra.__all__:
        thing = getattr(palestra, name)
        module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
        if module and qualname and module.startswith("palestra"):
            lines += ["", f"::: {module}.{qualname}"]
        else:
            lines += ["", f"## {name}", "", f"`{thing!r}`"]
    return "\n".join(lines)


def _commands() -> str:
    from palestra.cli.main import cli

    lines = ["# Command line", "", "Each page is what `--help` says."]
    for path, text in _help_pages(cli, "palestra"):
        lines += ["", f"## {path}", "", "```text", text, "```"]
    return "\n".join(lines)


def _help_pages(command: Any, path: str) -> Iterator[tuple[str, str]]:
    import click

    context = click.Context(command, info_name=path, max_content_width=100, terminal_width=100)
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _help_pages(child, f"{path} {name}")


def _settings() -> str:
    from palestra.core.config import RunConfig

    lines = ["# Settings", "", "As options (`--train.learning_rate 2e-5`), in a YAML file, or in a dict from Python."]
    lines += ["", "| setting | default | what it does |", "| --- | --- | --- |"]
    for section, field in RunConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is None:
            lines.append(_setting_row(section, field))
        else:
            lines += [_setting_row(f"{section}.{name}", one) for name, one in inner.items()]
    return "\n".join(lines)


def _setting_row(name: str, field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    cells = (f"`{name}`", f"`{json.dumps(default, default=str)}`", field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _tools() -> str:
    from palestra.extras.agent_tools.tools import TOOLS

    lines = ["# Tools for agents", "", "Over MCP, HTTP and Python alike; agent_tools.md tells how they work together."]
    for tool in TOOLS.values():
        lines += ["", f"## {tool.name}", "", tool.description, "", "```json"]
        lines += [json.dumps(tool.parameters, indent=2, ensure_ascii=False), "```"]
    return "\n".join(lines)
