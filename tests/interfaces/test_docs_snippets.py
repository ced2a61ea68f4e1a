"""Blocks of Python, YAML, JSON and TOML in README and docs: Python runs, the others are what their readers accept."""

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from doc_pages import PAGES, ROOT, blocks, name_of, wrong_names

from palestra.core.config import RunConfig, read_yaml_config
from palestra.extras.agent_tools.locks import Site

pytestmark = pytest.mark.extras  # the docs are about all of it

SHORT = {
    "train": {"max_steps": 1, "problems_per_step": 1},
    "rollout": {"group_size": 2, "max_new_tokens": 8},
    "eval": {"cases": 1},
}
RUN_ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/tutorial.md": "the fixture `docs_folder`",
    "docs/bring_your_agent.md": "test_agent_programs_command.py",
}
IN_BACKGROUND = {"docs/runs.md", "docs/agent_tools.md"}  # they start processes: make test-docs
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
QUICK = [page for page in WITH_PYTHON if name_of(page) not in {*RUN_ELSEWHERE, *IN_BACKGROUND}]


@pytest.fixture
def names(docs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the pages speak of before they use it; `train_grpo` trains one short step."""
    from palestra import api, train_grpo
    from palestra.models.loading import load_model

    resolve = api.GRPOTrainer._resolve
    shorten = lambda self, problems: RunConfig.build(resolve(self, problems).model_dump(), SHORT)  # noqa: E731
    monkeypatch.setattr(api.GRPOTrainer, "_resolve", shorten)
    monkeypatch.chdir(docs_folder)
    RunConfig.build(SHORT).save(Path("config.yaml"))
    known = runpy.run_path("my_agent.py") | {"train_grpo": train_grpo}
    loaded = load_model("palestra/tiny")
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-4)
    return known | {
        "model": loaded.model,
        "tokenizer": loaded.tokenizer,
        "reward_model": lambda output, expected: float(expected in output),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }


def run_blocks(page: Path, names: dict[str, Any], steps: str = r"\g<0>") -> None:
    for block in blocks(page, "python"):
        if not block.not_run:
            text = re.sub(r"(?<=train.max_steps\", )\d+|(?<=train.max_steps\": )\d+", steps, block.text)
            exec(compile(text, name_of(page), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", QUICK, ids=name_of)
def test_every_block_of_python_runs(page: Path, names: dict[str, Any]) -> None:
    if name_of(page) == "docs/export.md":
        names["result"] = names["train_grpo"](names["agent"], names["suite"])
    run_blocks(page, names)


@pytest.mark.slow("trains in the background: make test-docs")
@pytest.mark.parametrize("name", sorted(IN_BACKGROUND))
def test_every_block_of_python_that_starts_a_run_runs(name: str, names: dict[str, Any]) -> None:
    from palestra.runs.manager import RunManager

    run_blocks(ROOT / name, names, steps="1")
    *_, now = RunManager().watch(names.get("run_id") or names["run"].run_id)
    assert now.state == "completed"


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_names_and_arguments_of_palestra_exist_in_blocks_that_are_not_run_too(page: Path) -> None:
    assert [wrong for block in blocks(page, "python") for wrong in wrong_names(block.text)] == []


def test_a_name_or_argument_that_does_not_exist_is_found() -> None:
    text = "from palestra import Agent, Agnet\nAgent('a', modell='b')\n"
    assert wrong_names(text) == ["palestra.Agnet", "Agent(modell=)"]


def test_a_block_that_is_not_run_says_why() -> None:
    """Add to this list only what needs a GPU, a key, the network or a package that `make test` does not install."""
    assert {name_of(page) for page in PAGES for block in blocks(page) if block.not_run} == {"docs/tinker.md"}


def test_every_other_block_is_valid(tmp_path: Path) -> None:
    for page in PAGES:
        for block in blocks(page):
            match block.language:
                case "json" if "…" not in block.text and "..." not in block.text:
                    json.loads(block.text)
                case "toml":
                    tomllib.loads(block.text)
                case "yaml" if name_of(page) == "docs/agent_tools.md":
                    Site.model_validate(yaml.safe_load(block.text))
                case "yaml":
                    file = tmp_path / "config.yaml"
                    file.write_text(block.text)
                    RunConfig.build(read_yaml_config(file))
                case "" | "text":  # no command hides in what is not checked
                    assert not re.search(r"^ *(\$ )?(palestra [a-z]|make [a-z]|pip )", block.text, re.MULTILINE)
                case "json" | "python" | "sh" | "bash":
                    pass
                case _:
                    raise AssertionError(f"{name_of(page)} has a block of {block.language!r}, which no test reads")
