"""The front end's modules: whoever imports a name finds it and uses it, and nothing is exported for nobody."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import palestra.extras.dashboard

STATIC = Path(palestra.extras.dashboard.__file__).parent / "static"
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


ENVIRONMENTS = [{"name": "calculator", "family": None}, {"name": "mine"}, *[{"family": "gym"}] * 2]
ROWS = [{"group": group, "kind": kind} for group, kind in ((1, "a"), (1, "a"), (2, "a"), (2, "b"), (1, "a"))]
RUNS = [{"eval_pass_rate": 1, "pass_rate": 0.95}, {"pass_rate": 0.95}, {"pass_rate": None}]
PLACE = "{scrollWidth: 2600, clientWidth: 1400, scrollLeft: x}"


@needs_node
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (f"byFamily({json.dumps(ENVIRONMENTS)}).map(([f, m]) => [f, m.length])", [[None, 1], [None, 1], ["gym", 2]]),
        (f"neighbours({json.dumps(ROWS)}).map((rows) => rows.length)", [2, 1, 1, 1]),
        (f"[0, 400, 1000, 1200].map((x) => columnsBeyond(8, {PLACE}))", [4, 3, 1, 0]),
        ("rolloutsOfStep({planned: 64, mean: 64})", "64"),
        ("axisLabels([0, 0.5, 1], true)", ["0 %", "50 %", "100 %"]),
        ("axisLabels([0, 0.002])", ["0", "2.00e-3"]),
        (f"{json.dumps(RUNS)}.map(passRate)", [["100 %", "held out"], ["95 %", "training"], ["", ""]]),
    ],
)
def test_what_pages_format(expression: str, value: Any) -> None:
    assert evaluate("lib/format.js", expression) == value


@needs_node
def test_extra_sampling_is_explained_and_a_run_without_findings_is_praised_only_if_it_took_its_steps() -> None:
    said = {
        ("failed", 3): "The run failed",
        ("failed", 0): "failed before its first step",
        ("stopped", 0): "no steps",
        ("running", 0): "after the first steps",
        ("running", 3): "so far",
        ("completed", 3): "No problems found",
    }
    runs = [{"state": state, "active": state == "running", "step": step} for state, step in said]
    texts = evaluate(
        "lib/format.js", f"[rolloutsOfStep({{planned: 64, mean: 118.7}}), ...{json.dumps(runs)}.map(noFindings)]"
    )
    for words, text in zip(["119 on average, 64 by the settings", *said.values()], texts, strict=True):
        assert words in text
    assert "train.signal_share" in texts[0]
    assert not any("No problems" in text for text in texts[1:3])
