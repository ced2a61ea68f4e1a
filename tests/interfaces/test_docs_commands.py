"""What README and docs tell people to type: each command parses with its options and values, and what is quick runs.

`make test-docs` also trains a step where the others only load, and starts every server.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from doc_pages import (
    PAGES,
    ROOT,
    all_options,
    mentioned_commands,
    mentioned_options,
    mentioned_settings,
    name_of,
    palestra_command,
    parse,
    shell_lines,
    unknown_parts,
)
from served import free_port, wait_for_port

from palestra.cli.main import run
from palestra.core.errors import PalestraError

pytestmark = pytest.mark.extras  # the docs are about all of it

# What is parsed but not run, and why.
NOT_RUN = {
    r"(train|eval) .*--(agent-cmd|agent-port|mcp|cases)": "files of the user's; test_agent_programs_command.py",
    r"serve|tinker|mcp|http|trajectory|dashboard|gateway|record": "a server, until Ctrl-C; make test-docs starts it",
    r"sft .*Qwen": "a model of the hub: a download",
    r"env serve|train .*--env-url": "waits for the other end; tests/interfaces/test_env_serve.py",
    r"env run-atropos": "installs atroposlib; make test-foreign",
    r"train .*--env (verifiers|openenv):": "a package of others; make test-foreign",
    r"train .*--rollout.policy_url": "needs a server of its own; tests/parity/test_two_processes.py",
    r"train .*--vllm\.": "needs vLLM; tests/unit/policy and docs/scaling.md",
    r"train .*--backend tinker": "needs a key; tests/unit/tinker_backend",
    r"train .*--backend ray": "needs Ray; make test-ray",
    r"train .*--nproc": "starts as many processes; tests/extras/ranks/test_parity.py",
    r"train .*--output_dir /": "two machines; tests/extras/ranks/test_parity.py",
    r"train .*(--detach|--resume)": "in the background; tests/interfaces/test_runs_command.py",
    r"runs (resume|finish|watch|stop|rm|logs)": "of a run in the background; tests/interfaces/test_runs_command.py",
    r".*Qwen/": "a model of the hub: a download",
    r".*examples/planner.py": "for a model of 1.5B; tests/interfaces runs these commands with palestra/tiny",
    r"export .*--to hub": "uploads; tests/interfaces/test_export_command.py has a hub of its own",
    r"doctor": "looks at the whole machine; tests/interfaces/test_doctor.py",
}
# Commands of others, and what tries them.
OTHERS = {
    r"make [\w-]+$": "the target exists: test_targets_and_extras_exist",
    r"(pip|uv|uv pip) (install|add|wheel) ": "the extras exist: test_targets_and_extras_exist; else the network",
    r"npm install ": "the network; make test-agents",
    r"curl .*/(attempts|tools/rl_)": "a request to our servers; test_agent_programs_command.py, test_rl_transports.py",
    r"\.venv/bin/(pytest|ruff|mypy)": "tools of the extra dev",
    r"python examples/judge_agreement.py ": "asks a model; test_judge_agreement.py",
    r"folder=|exec docker run ": "needs docker; test_agent_programs_command.py runs it with a stand-in",
    r"ollama run ": "needs Ollama; tests/extras/gguf/test_ollama.py",
    r"(vllm serve|ray start) ": "another program; make test-vllm, make test-ray",
    r"export TINKER_API_KEY=|python -m tinker_cookbook|torchrun .* my_script.py|python my_agent.py": "the user's own",
}
# An outline of a command, not a line to type: alternatives, optional parts, any setting.
OUTLINE = re.compile(r"\||\[|…|--section\.key|\b(NAME|AGENT_FILE)\b")
RUN_ID = re.compile(r"\bRUN\b|k3f9|runs/my-agent-\d+-\d+")
SHORT = (
    "--train.max_steps 1 --train.problems_per_step 1 --rollout.group_size 2 --rollout.max_new_tokens 16 --eval.cases 1"
)


def all_commands() -> list[str]:
    """The commands of palestra in the pages' shell blocks, each once."""
    lines = (palestra_command(line) for page in PAGES for line in shell_lines(page))
    return list(dict.fromkeys(line for line in lines if line))


def why_not_run(line: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, line)), "")


COMPLETE = [line for line in all_commands() if not OUTLINE.search(line)]
QUICK = [line for line in COMPLETE if not why_not_run(line)]
SERVERS = [
    line for line in COMPLETE if re.match(r"serve|tinker|mcp --http|http|trajectory|dashboard$|gateway|record", line)
]


@pytest.fixture
def folder(docs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(docs_folder)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return docs_folder


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_of_the_text_exists(page: Path) -> None:
    lines = [line for one in shell_lines(page) if (line := palestra_command(one)) is not None]
    parts = [part for line in lines + mentioned_commands(page) for part in re.split(r" \| palestra ", line)]
    assert {line: wrong for line in parts if (wrong := unknown_parts(line))} == {}


def test_every_option_and_setting_that_a_page_names_exists() -> None:
    known = all_options()
    others = {"--no-deps", "--small", "--no-enable-chunked-prefill"}  # of pip, scripts/results.py and vLLM
    others |= {"--init", "--network", "--user"}  # of docker run
    others |= {"--max-lora-rank", "--max-loras", "--enable-lora", "--enable-sleep-mode"}
    own = ("--env.", "--openai.")  # an environment's
    found = {(name_of(page), name) for page in PAGES for name in mentioned_options(page)}
    assert {(page, name) for page, name in found if name not in known | others and not name.startswith(own)} == set()
    assert {(name_of(page), name) for page in PAGES for name in mentioned_settings(page)} == set()


@pytest.mark.parametrize("line", COMPLETE)
def test_every_complete_command_parses_with_valid_values(line: str, folder: Path) -> None:
    (folder / "gsm8k_server.py").touch()
    parse(line)


def test_a_command_an_option_or_a_value_that_is_wrong_is_found() -> None:
    assert unknown_parts("trian x.py") == ["trian"]
    assert unknown_parts("train x.py --train.learning_rat=1") == ["--train.learning_rat"]
    assert unknown_parts("runs list|wach") == ["wach"]
    for line in ("train x.py --lora.r many", "plan --gpus", "export RUN --to gguff", "bench stray words"):
        with pytest.raises((click.UsageError, PalestraError)):
            parse(line)


def test_every_line_of_a_shell_block_is_known() -> None:
    """Add a line of another program to OTHERS with what tries it, or why nothing can."""
    lines = [(name_of(page), line) for page in PAGES for line in shell_lines(page) if palestra_command(line) is None]
    bare = [(page, re.sub(r"^([A-Z_]+=\S* )+", "", line)) for page, line in lines]
    assert [(page, line) for page, line in bare if not any(re.match(known, line) for known in OTHERS)] == []
    assert [known for known in OTHERS if not any(re.match(known, line) for _, line in bare)] == []
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in all_commands())] == []


def test_targets_and_extras_exist() -> None:
    text = "\n".join(line for page in PAGES for line in shell_lines(page))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`?make ([\w-]+)", text)) | {
        target for page in PAGES for target in re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))
    }
    assert {target for target in named if f"\n{target}:" not in makefile} == set()
    extras = {name for names in re.findall(r"palestra\[([\w,-]+)\]", text) for name in names.split(",")}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras - known.keys() == set()
    modules = set(re.findall(r"\bpalestra(?:\.[a-z_]+)+(?=\.[A-Z])", text))
    assert {module for module in modules if not is_module(module)} == set()
    files = set(re.findall(r"\b(?:examples|scripts|benchmarks)/[\w./-]+\.\w+", text))
    assert {file for file in files if not (ROOT / file).exists()} == set()


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def to_run(line: str) -> list[str]:
    """The words of a line, for the runs and the model of the folder."""
    words = shlex.split(RUN_ID.sub("runs/stock-clerk-1", line).replace("p2x7", "runs/stock-clerk-2"))
    if words[0] == "eval":
        words += ["--eval.cases", "1", "--rollout.max_new_tokens", "8"]
    if words[0] == "init":
        words.append("new")
    return ["palestra/tiny" if word == "palestra/smollm2" else word for word in words]


@pytest.mark.parametrize("line", QUICK)
def test_every_quick_command_runs(line: str, folder: Path) -> None:
    assert run(to_run(line) + ["--dry-run"] * line.startswith("train")) == 0


# --- make test-docs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow("trains: make test-docs")
@pytest.mark.parametrize(
    "line", [line for line in QUICK if line.startswith(("train", "sft")) and not re.search("--(teacher|traces)", line)]
)
def test_every_training_takes_a_step(line: str, folder: Path) -> None:
    assert run([*to_run(line), *SHORT.split()]) == 0


@pytest.mark.slow("trains: make test-docs")
@pytest.mark.parametrize(
    "line", [line for line in COMPLETE if "python examples/agents/" in line and "Qwen" not in line]
)
def test_every_agent_whose_package_is_installed_takes_a_step(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = re.search(r"examples/agents/(\w+)\.py", line)[1]
    package = {"openai": "openai", "anthropic": "anthropic", "langgraph": "langgraph", "pydantic": "pydantic_ai"}
    needed = "agents" if program == "openai_agents" else package[program.split("_")[0]]
    pytest.importorskip(needed, reason=f"{program}.py needs {needed}: make test-agents")
    monkeypatch.chdir(ROOT)
    line = line.replace('"python ', f'"{sys.executable} ')
    assert run([*shlex.split(line), *SHORT.split(), "--output_dir", os.environ["PALESTRA_HOME"]]) == 0


@pytest.mark.slow("starts servers: make test-docs")
@pytest.mark.parametrize("line", SERVERS)
def test_every_server_listens_and_ends_with_ctrl_c(line: str, folder: Path) -> None:
    port = free_port()
    words = [word for word in to_run(re.sub(r" --(port|weights-from) \S+", "", line))]
    command = [sys.executable, "-m", "palestra", *words, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            wait_for_port(port, server, 120)
            server.send_signal(signal.SIGINT)
            output, _ = server.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
    assert server.returncode in (0, 130), output
    assert "Traceback" not in output
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0
