"""A training in a real Jupyter kernel. `make test-notebook` installs what it needs."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.interfaces.conftest import AGENT_FILE

nbformat = pytest.importorskip("nbformat", reason="no Jupyter: make test-notebook")
nbclient = pytest.importorskip("nbclient", reason="no Jupyter: make test-notebook")
pytest.importorskip("ipykernel", reason="no Jupyter: make test-notebook")

CELLS = [
    "from palestra import train_grpo",
    AGENT_FILE.replace('"train.max_steps": 1', '"train.max_steps": 3'),
    "result = train_grpo(agent, suite, config=config)",
    "result",
]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of the notebook after a kernel has run them."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = os.environ | {"PYTHONPATH": paths, "PALESTRA_HOME": str(folder / "home"), "HOME": str(folder)}
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environ)
    return list(notebook.cells)


def html_of(cell: Any) -> list[str]:
    return [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def test_the_training_is_one_output_with_curves_and_the_last_steps(cells: list[Any]) -> None:
    [shown] = html_of(cells[2])
    assert shown.count("<svg") == 2
    assert "<td>3</td>" in shown
    assert "run folder" in shown
    assert "<b>" in shown
    assert [output for output in cells[2].outputs if output.output_type == "error"] == []


def test_the_result_shows_before_and_after_with_intervals(cells: list[Any]) -> None:
    [shown] = html_of(cells[3])
    assert "<td>right_price</td>" in shown
    assert " % (" in shown
    assert str(Path("runs")) in shown
