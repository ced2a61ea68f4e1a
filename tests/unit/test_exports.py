import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module

import pytest

import palestra

# What users import. A name may be added here; one that is taken away breaks their code.
PUBLIC = (
    "Agent Context Env EnvConfig EvalSuite GRPOTrainer GRPOTrainingConfig GRPOTrainingResult McpServer PalestraError "
    "Tool UserSimulator "
    "command_agent evaluate fail_reason function_tool judge measure pass_reason ruler train_grpo train_sft "
    "turn_scores"
).split()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    thing = getattr(palestra, name)
    assert thing.__name__ == name
    assert thing.__doc__
    assert inspect.getmodule(thing).__name__.startswith("palestra.")


def test_the_public_names_are_listed_for_help_for_star_imports_and_for_completion():
    assert sorted(palestra.__all__) == sorted(PUBLIC)
    assert dir(palestra) == sorted(PUBLIC)
    star: dict[str, object] = {}
    exec("from palestra import *", star)
    assert star.keys() - {"__builtins__"} == set(PUBLIC)
    assert re.fullmatch(r"\d+\.\d+\.\d+", palestra.__version__)
    with pytest.raises(AttributeError, match="no attribute 'train_gpro'"):
        _ = palestra.train_gpro


def test_type_checkers_find_each_name_where_it_is_loaded_from():
    tree = ast.parse(inspect.getsource(palestra))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen.keys() == set(PUBLIC)
    for name, module in seen.items():
        assert getattr(import_module(module), name) is getattr(palestra, name)


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import palestra", {"torch", "transformers", "pydantic", "numpy", "rich", "typing"}),
        ("from palestra import Agent, EvalSuite, function_tool, judge, measure, pass_reason, fail_reason",
         {"torch", "transformers", "pydantic", "datasets"}),
    ],
)  # fmt: skip
def test_importing_loads_nothing_heavy(statement, heavy):
    script = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & heavy
