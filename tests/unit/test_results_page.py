"""The results that the README shows are those of the files in docs/results/data."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_readme_and_the_page_show_the_table_that_the_files_give(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import results
    import results_page

    runs = results_page.found_runs(results.RECIPES, results.DATA)
    table = results_page._tables(results.RECIPES, runs)
    assert all(len(members) == 3 for members in runs.values())
    planner = dict.fromkeys(("planner", "planner_auto", "planner_demonstrations"), 18)
    least = planner | {"converter_auto": 29}  # an agent's own suite
    for name, members in runs.items():
        assert all(run["after"]["pass_rate"]["n"] >= least.get(name, 200) for run in members)
    start, end = results_page.MARKS
    readme = (ROOT / "README.md").read_text()
    assert readme.partition(start)[2].partition(end)[0].strip() == table.strip()
    assert table in (ROOT / "docs/results/README.md").read_text()
    for name in ("results", "results_page"):
        sys.modules.pop(name, None)
