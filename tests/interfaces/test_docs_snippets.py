"""What README and docs tell people to type: every command and option exists, and what is quick runs, Python too."""

import contextlib
import io
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from palestra.cli.main import cli, run
from palestra.core.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = {
    f"{section}.{name}" for section, field in RunConfig.model_fields.items()
    for name in getattr(field.annotation, "model_fields", {})
} | set(RunConfig.model_fields)  # fmt: skip


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for _, language, text in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    """The words of each line that starts with `palestra`, lines with a continuation joined, comments left out."""
    lines = [
        line for block in blocks(page, "sh", "bash", "console") for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(re.sub(r"\[([^\]]*)\]", "", line), comments=True) for line in lines if "…" not in line]
    starts = [[w for w in line if not re.fullmatch(r"[A-Z_]+=\S*", w)] for line in words]  # without variables
    return [line for line in starts if line and line[0] == "palestra"]


def unknown_parts(words: list[str]) -> list[str]:
    """What of one command line does not exist."""
    command, rest = cli, words[1:]
    context = click.Context(cli)
    while isinstance(command, click.Group) and rest:
        name, *rest = rest
        if name.startswith("-"):
            return [] if name in {"--help", "--version"} else [name]
        found = [command.get_command(context, one) for one in name.split("|")]
        if None in found:
            return [name]
        command = found[0]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.split("=")[0] for word in rest if word.startswith("--") and word != "--"]
    own = ("env.", "openai.", "section.")
    return [
        name for name in given
        if name not in options and name[2:] not in SETTINGS and not name[2:].startswith(own) and name != "--help"
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_exists_with_its_options(page: Path) -> None:
    wrong = {" ".join(words): parts for words in commands(page) if (parts := unknown_parts(words))}
    assert wrong == {}


def test_a_command_or_option_that_does_not_exist_is_found() -> None:
    assert unknown_parts(["palestra", "trian", "x.py"]) == ["trian"]
    assert unknown_parts(["palestra", "train", "x.py", "--train.learning_rat=1"]) == ["--train.learning_rat"]


# --- Python blocks ---------------------------------------------------------------------------------------------------

SHORT = {
    "train": {"max_steps": 1, "problems_per_step": 1},
    "rollout": {"group_size": 2, "max_new_tokens": 8},
    "eval": {"cases": 1},
}
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")  # right before a block: why no test can run it
RUN_ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/tutorial.md": "the fixture `trained`",
    "docs/bring_your_agent.md": "test_agent_programs_command.py",
}
IN_BACKGROUND = {"docs/runs.md", "docs/agent_tools.md"}  # they start processes: make test-slow


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(page: Path) -> list[tuple[str, str]]:
    """Each block, and the reason for which it is not run (none: "")."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [(m[2], reason[1] if (reason := NOT_RUN.search(text[: m.start()])) else "") for m in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tutorial's agent, scored and trained for a step as it says, in two runs."""
    folder = tmp_path_factory.mktemp("docs")
    with contextlib.chdir(folder):
        Path("my_agent.py").write_text("\n".join(blocks(ROOT / "docs" / "tutorial.md", "python")))
        Path("my_env.py").write_text(blocks(ROOT / "docs" / "environments.md", "python")[0])
        assert run(["eval", "my_agent.py", "--eval.cases", "2", "--rollout.max_new_tokens", "30"]) == 0
        options = ["--train.max_steps", "1", "--rollout.group_size", "2", "--train.problems_per_step", "1"]
        limits = ["--rollout.max_new_tokens", "30", "--eval.cases", "1"]
        for name in ("stock-clerk-1", "stock-clerk-2"):
            assert run(["train", "my_agent.py", "--folder", f"runs/{name}", *options, *limits]) == 0
    return folder


@pytest.fixture
def names(trained: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the pages speak of before they use it; `train_grpo` trains one short step."""
    from palestra import api, train_grpo
    from palestra.models.loading import load_model

    resolve = api.GRPOTrainer._resolve
    shorten = lambda self, problems: RunConfig.build(resolve(self, problems).model_dump(), SHORT)  # noqa: E731
    monkeypatch.setattr(api.GRPOTrainer, "_resolve", shorten)
    monkeypatch.chdir(trained)
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
    for text, reason in python_blocks(page):
        if not reason:
            text = re.sub(r"(?<=train.max_steps\", )\d+|(?<=train.max_steps\": )\d+", steps, text)
            exec(compile(text, name_of(page), "exec", dont_inherit=True), names)


QUICK = [p for p in PAGES if python_blocks(p) and name_of(p) not in {*RUN_ELSEWHERE, *IN_BACKGROUND}]


@pytest.mark.parametrize("page", QUICK, ids=name_of)
def test_every_block_of_python_runs(page: Path, names: dict[str, Any]) -> None:
    if name_of(page) == "docs/export.md":
        names["result"] = names["train_grpo"](names["agent"], names["suite"])
    run_blocks(page, names)


@pytest.mark.slow("trains in the background: make test-slow")
@pytest.mark.parametrize("name", sorted(IN_BACKGROUND))
def test_every_block_of_python_that_starts_a_run_runs(name: str, names: dict[str, Any]) -> None:
    from palestra.runs.manager import RunManager

    run_blocks(ROOT / name, names, steps="1")
    *_, now = RunManager().watch(names.get("run_id") or names["run"].run_id)
    assert now.state == "completed"


def test_a_block_that_is_not_run_says_why() -> None:
    """Add to this list only what needs a GPU, a key, the network or a package that `make test` does not install."""
    found = {(name_of(page), reason) for page in PAGES for _, reason in python_blocks(page) if reason}
    assert {name for name, _ in found} == {"docs/tinker.md"}


# --- Commands --------------------------------------------------------------------------------------------------------

# What is checked for its options only, and why.
ONLY_CHECKED = {
    r"(train|eval) .*--(agent-cmd|agent-port|mcp|cases)": "files of the user's; test_agent_programs_command.py",
    r"serve|tinker|mcp|http|trajectory|dashboard|gateway|record": "a server, until Ctrl-C; tests/interfaces runs each",
    r"judge-check|improve": "asks a model, often elsewhere; test_judge_check.py and test_improve_command.py",
    r"sft ": "conversations of the user's; tests/unit/train/test_stages.py",
    r"env serve|train .*--env-url": "waits for the other end; tests/interfaces/test_env_serve.py",
    r"env run-atropos": "installs atroposlib; make test-foreign",
    r"train .*--env (verifiers|openenv):": "a package of others; make test-foreign",
    r"train .*--rollout.policy_url": "needs a server of its own; tests/parity/test_two_processes.py",
    r"train .*--vllm\.": "needs vLLM; tests/unit/policy and docs/scaling.md",
    r"train .*--backend tinker": "needs a key; tests/unit/tinker_backend",
    r"train .*--backend ray": "needs Ray; make test-ray",
    r"train .*--nproc": "starts as many processes; tests/parity/test_ranks.py",
    r"train .*--detach|runs (resume|finish|watch|stop|rm|logs)": "in the background; interfaces/test_runs_command.py",
    r".*Qwen/": "a model of the hub: a download",
    r".*examples/planner.py": "for a model of 1.5B; tests/interfaces runs these commands with palestra/tiny",
    r"doctor": "looks at the whole machine; tests/interfaces/test_doctor.py",
}
SYNOPSIS = re.compile(r"[A-Z_]+\||\||\[|--section\.key|(NAME|FILE|MODEL|AGENT_FILE)\b")
RUN_ID = re.compile(r"RUN|k3f9|runs/my-agent-\d+-\d+")


def why_only_checked(line: str) -> str:
    return next((why for pattern, why in ONLY_CHECKED.items() if re.match(pattern, line)), "")


def command_lines() -> list[str]:
    """Each command that can be run, as it stands in the pages."""
    text = "\n".join(block for page in PAGES for block in blocks(page, "sh", "bash", "console"))
    lines = [line.split("  #")[0].split(" # ")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    found = dict.fromkeys(line.removeprefix("palestra ") for line in lines if line.startswith("palestra "))
    return [line for line in found if not SYNOPSIS.search(line) and "…" not in line]


@pytest.mark.parametrize("line", [line for line in command_lines() if not why_only_checked(line)])
def test_every_quick_command_runs(line: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    words = shlex.split(RUN_ID.sub("runs/stock-clerk-1", line).replace("p2x7", "runs/stock-clerk-2"))
    if words[0] == "train":
        words.append("--dry-run")  # loads everything, and ends
    if words[0] == "eval":
        words += ["--eval.cases", "1", "--rollout.max_new_tokens", "8"]
    if "palestra/smollm2" in words:
        words[words.index("palestra/smollm2")] = "palestra/tiny"
    assert run(words) == 0


def test_what_else_is_typed_exists() -> None:
    """Targets of make, and the extras that pip is asked for."""
    text = "\n".join(block for page in PAGES for block in blocks(page, "sh", "bash", "console"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
    extras = {name for names in re.findall(r"palestra\[([\w,-]+)\]", text) for name in names.split(",")}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras - known.keys() == set()
