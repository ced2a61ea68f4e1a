"""Every public name of the last release works, or stands under *Removed* in the changelog."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.extras

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "tests" / "support" / "public_names_0.2.0.txt"


def test_a_public_name_that_is_gone_stands_under_removed_in_the_changelog() -> None:
    names = runpy.run_path(str(ROOT / "scripts" / "public_names.py"))["public_names"]()
    gone = set(RELEASED.read_text().splitlines()) - set(names)
    removed = (ROOT / "CHANGELOG.md").read_text().partition("### Removed")[2].partition("\n### ")[0]
    unlisted = [line for line in gone if f"`{line.partition(' ')[2]}`" not in removed]
    assert not unlisted, f"add them to Removed, with what to use instead: {sorted(unlisted)}"


def test_names_of_the_core_and_of_extras_are_listed() -> None:
    names = runpy.run_path(str(ROOT / "scripts" / "public_names.py"))["public_names"]()
    assert {"python palestra.train_grpo", "setting vllm.mode", "command palestra train"} <= set(names)
