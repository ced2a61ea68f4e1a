"""`palestra runs prune`: give disk space back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from palestra.cli.common import debug_option
from palestra.cli.find_run import require_run, run_argument
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_path, show_size
from palestra.runs.prune import cache_garbage, run_garbage
from palestra.runs.reader import RunReader


@click.command("prune")
@run_argument(many=True, required=False)
@click.option("--keep-cache", is_flag=True, help="Leave the converted GGUF files in the cache.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@debug_option
def prune(runs: Sequence[str], keep_cache: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete old checkpoints of runs that have ended, and the cache of converted GGUF files.

    Of each run the newest and the best checkpoint stay, so that it can still be resumed; models, metrics, rollouts
    and reports are left alone (`palestra runs rm` deletes whole runs). With RUN…, only of those runs.
    """
    if runs:
        folders = [require_run(word) for word in runs]
    else:
        folders = [RunFolder(run.folder) for run in RunReader().list() if not run.is_active]
    garbage = [found for folder in folders for found in run_garbage(folder)]
    garbage += [] if runs or keep_cache else cache_garbage()
    total = sum(found.size for found in garbage)
    if not as_json:
        for found in garbage:
            click.echo(f"{show_size(found.size):>8}  {show_path(Path(found.path))}  ({found.why})")
    if garbage and not dry_run:
        if not yes:
            click.confirm(f"Delete {len(garbage)} folders, {show_size(total)}?", abort=True, err=True)
        for found in garbage:
            found.delete()
    if as_json:
        rows = [{"path": str(found.path), "why": found.why, "bytes": found.size} for found in garbage]
        click.echo(json.dumps({"deleted": not dry_run, "bytes": total, "folders": rows}))
    else:
        word = "would be freed" if dry_run else "freed"
        click.echo(f"{show_size(total)} {word}" if garbage else "There is nothing to delete.")
