import subprocess
import sys

import pytest

import palestra


@pytest.mark.parametrize("name", palestra.__all__)
def test_every_public_name_is_there(name):
    assert getattr(palestra, name) is not None
    assert name in dir(palestra)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'train_gpro'"):
        _ = palestra.train_gpro


def loaded_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_palestra_loads_nothing_heavy():
    assert not loaded_after("import palestra") & {"torch", "transformers", "pydantic", "numpy", "rich", "typing"}


def test_declaring_an_agent_and_a_suite_loads_no_torch():
    names = "Agent, EvalSuite, function_tool, judge, measure, pass_reason, fail_reason"
    assert not loaded_after(f"from palestra import {names}") & {"torch", "transformers", "pydantic", "datasets"}
