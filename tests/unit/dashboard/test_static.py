"""The front end's modules: whoever imports a name finds it and uses it, and nothing is exported for nobody."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import palestra.dashboard

STATIC = Path(palestra.dashboard.__file__).parent / "static"
MODULES = {path: path.read_text(encoding="utf-8") for path in STATIC.rglob("*.js") if "vendor" not in path.parts}
IMPORT = re.compile(r'import \{([^}]+)\} from "([^"]+)";')
EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|class) (\w+)", re.MULTILINE)


def imports(path: Path) -> list[tuple[str, str, Path]]:
    """(its name there, its name here, the module) of each imported name."""
    found = []
    for names, module in IMPORT.findall(MODULES[path]):
        for name in filter(None, (name.strip() for name in names.split(","))):
            there, _, here = name.partition(" as ")
            found.append((there, here or there, (path.parent / module).resolve()))
    return found


def test_every_imported_name_is_exported_and_used() -> None:
    assert len(MODULES) > 30
    for path, text in MODULES.items():
        body = IMPORT.sub("", text)
        for there, here, module in imports(path):
            assert there in EXPORT.findall(MODULES[module]), f"{path.name}: {module.name} exports no {there}"
            assert re.search(rf"\b{re.escape(here)}\b", body), f"{path.name} imports {here}, and does not use it"


def test_every_exported_name_is_imported_somewhere() -> None:
    used = {(there, module) for path in MODULES for there, _, module in imports(path)}
    for path, text in MODULES.items():
        pages = {"show"} if path.parent.name == "pages" else set()  # app.js imports them by their address
        unused = [name for name in EXPORT.findall(text) if name not in pages and (name, path.resolve()) not in used]
        assert unused == [], f"{path.name} exports {unused} for nobody"


def test_a_layer_imports_only_those_below_it() -> None:
    order = {"lib": 0, "components": 1, "pages": 2, "static": 3}
    for path in MODULES:
        for _, _, module in imports(path):
            assert order[module.parent.name] <= order[path.parent.name], f"{path.name} imports {module.name}"
            assert path.parent.name != "pages" or module.parent.name != "pages", "pages know nothing of each other"


def evaluate(module: str, expression: str) -> Any:
    """The value of an expression at the end of a module that imports nothing."""
    script = f"{(STATIC / module).read_text(encoding='utf-8')}\nconsole.log(JSON.stringify({expression}));"
    command = ["node", "--input-type=module", "-"]
    return json.loads(subprocess.run(command, input=script, capture_output=True, text=True, check=True).stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")


@needs_node
def test_the_datasets_of_a_family_are_one_entry() -> None:
    rows = [{"name": "calculator", "family": None}, {"name": "mine"}]
    rows += [{"name": f"reasoning_gym/{n}", "family": "reasoning_gym"} for n in "ab"]
    found = evaluate("lib/format.js", f"byFamily({json.dumps(rows)})")
    assert [(family, len(members)) for family, members in found] == [(None, 1), (None, 1), ("reasoning_gym", 2)]


@needs_node
def test_rollouts_of_one_group_that_follow_each_other_are_shown_together() -> None:
    rows = [{"group": group, "kind": kind} for group, kind in ((1, "a"), (1, "a"), (2, "a"), (2, "b"), (1, "a"))]
    found = evaluate("lib/format.js", f"neighbours({json.dumps(rows)})")
    assert [len(rows) for rows in found] == [2, 1, 1, 1]


@needs_node
@pytest.mark.parametrize(("scrolled", "hidden"), [(0, 4), (400, 3), (1000, 1), (1200, 0)])
def test_the_columns_out_of_view_are_counted(scrolled: int, hidden: int) -> None:
    place = {"scrollWidth": 2600, "clientWidth": 1400, "scrollLeft": scrolled}
    assert evaluate("lib/format.js", f"columnsBeyond(8, {json.dumps(place)})") == hidden


@needs_node
def test_extra_sampling_is_explained() -> None:
    usual, more = (evaluate("lib/format.js", f"rolloutsOfStep({{planned: 64, mean: {n}}})") for n in (64, 118.7))
    assert usual == "64"
    assert more.startswith("119 on average, 64 by the settings")
    assert "train.signal_share" in more


@needs_node
def test_a_pass_rate_says_whether_it_is_held_out() -> None:
    runs = [{"eval_pass_rate": 1, "pass_rate": 0.95}, {"pass_rate": 0.95}, {"pass_rate": None}]
    found = evaluate("lib/format.js", f"{json.dumps(runs)}.map(passRate)")
    assert found == [["100 %", "held out"], ["95 %", "training"], ["", ""]]


@needs_node
@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"state": "failed", "active": False, "step": 3}, "The run failed"),
        ({"state": "failed", "active": False, "step": 0}, "failed before its first step"),
        ({"state": "stopped", "active": False, "step": 0}, "no steps"),
        ({"state": "running", "active": True, "step": 0}, "after the first steps"),
        ({"state": "running", "active": True, "step": 3}, "so far"),
        ({"state": "completed", "active": False, "step": 3}, "No problems found"),
    ],
)
def test_a_run_without_findings_is_praised_only_if_it_took_its_steps(run: dict[str, object], words: str) -> None:
    said = evaluate("lib/format.js", f"noFindings({json.dumps(run)})")
    assert words in said
    assert run["state"] != "failed" or "No problems" not in said
