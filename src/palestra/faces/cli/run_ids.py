"""Ids of runs on the command line: any unambiguous beginning will do, and the shell completes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from palestra.runs.manager import RunManager


class RunId(click.ParamType):
    """The id of a run, or its beginning, or the name of its folder."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from palestra.runs.manager import RunManager

        try:
            runs = RunManager().list()
        except Exception:  # a shell that completes has nowhere to show an error
            return []
        return [CompletionItem(r.run_id, help=f"{r.name} {r.state}") for r in runs if r.run_id.startswith(incomplete)]


def argument(many: bool = False) -> Any:
    return click.argument(
        "run_ids_given" if many else "run_id",
        metavar="RUN…" if many else "RUN",
        nargs=-1 if many else 1,
        required=True,
        type=RunId(),
    )


def find(manager: RunManager, word: str) -> str:
    """The id that is meant."""
    runs = manager.list()
    if any(run.run_id == word for run in runs):
        return word
    found = [r.run_id for r in runs if r.run_id.startswith(word) or r.folder.name == word.rstrip("/").split("/")[-1]]
    return found[0] if len(found) == 1 else word  # an unknown one is for the manager to complain about
