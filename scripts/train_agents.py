"""`make test-agents`: train a model with every program of examples/agents, and write docs/agents_table.md.

Each is a process that knows nothing of Palestra but its environment variables, and is trained for three steps: every
attempt must end by itself, no turn be re-tokenised, and the loss differ from 0. Programs with short prompts are trained
with palestra/tiny, coding agents and others with long prompts with a small random model of a long context.
With --learn, a program must bring palestra/tiny from at most 35 % to at least 90 % of the demo's held-out questions.
Packages go to build/agents: virtual environments and npm folders, so that one that cannot be installed stops no other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "agents"
PAGE = ROOT / "docs" / "agents_table.md"
BUILD = ROOT / "build" / "agents"
NODE, LONG_MODEL = BUILD / "node", BUILD / "long"
VIRTUAL_ENVIRONMENTS = {
    "python": [
        "openai>=3", "anthropic>=2", "openai-agents>=0.20", "langgraph>=1", "langchain>=1", "langchain-openai>=1",
        "pydantic-ai-slim[openai]>=2",
    ],
    "smolagents": ["smolagents[openai]>=1.20"],
    "mini_swe_agent": ["mini-swe-agent>=2", "mcp"],  # its litellm imports mcp, and does not require it
    "aider": ["aider-chat"],
}  # fmt: skip
NPM_FOLDERS = {
    "node": ["openai", "ai", "@ai-sdk/openai", "zod", "tsx"],
    "claude_code": ["@anthropic-ai/claude-code"],
    "codex": ["@openai/codex"],
    "opencode": ["opencode-ai"],
    "qwen_code": ["@qwen-code/qwen-code"],
}
BEFORE_AT_MOST, AFTER_AT_LEAST = 0.35, 0.90
STEPS = 3
SETTINGS = {  # by section of the page
    "Three steps": (
        f"--train.problems_per_step 2 --rollout.group_size 4 --train.max_steps {STEPS} --eval.cases 4 "
        "--agent.timeout_s 600"
    ),
    "Coding agents and other long prompts": (
        f"--train.problems_per_step 1 --rollout.group_size 2 --train.max_steps {STEPS} --rollout.max_new_tokens 512 "
        "--eval.cases 1 --agent.timeout_s 1200"
    ),
    "Programs that learn the demo": "--train.problems_per_step 8 --train.max_steps 14 --eval.cases 60",
}
SHORT, LONG, LEARN = SETTINGS
LONG_CONTEXT = 1 << 17  # tokens
LIMIT_S = 7200
Row = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """One example: its file, what it is, and where its packages are."""

    file: str
    about: str
    packages: str = "python"  # a virtual environment or an npm folder
    is_long: bool = False

    @property
    def folder(self) -> Path:
        return BUILD / self.packages

    @property
    def executables(self) -> Path:
        """The folder with the commands of its packages."""
        return self.folder / ("node_modules/.bin" if self.packages in NPM_FOLDERS else "bin")

    @property
    def section(self) -> str:
        """Section of the page in which its three steps are."""
        return LONG if self.is_long else SHORT

    def command(self) -> str:
        path = EXAMPLES / self.file
        if path.suffix == ".sh":
            return f"sh {path}"
        if self.packages != "node":
            return f"{self.executables / 'python'} {path}"
        runner = self.executables / "tsx" if path.suffix == ".ts" else "node"
        return f"{runner} {NODE / self.file}"


PROGRAMS = (
    Program("openai_chat.py", "OpenAI SDK, Chat Completions"),
    Program("openai_responses.py", "OpenAI SDK, Responses"),
    Program("anthropic_messages.py", "Anthropic SDK, Messages"),
    Program("openai_agents.py", "openai-agents"),
    Program("langgraph_agent.py", "LangGraph"),
    Program("pydantic_ai_agent.py", "pydantic-ai"),
    Program("openai_node.mjs", "Node, `openai` package", "node"),
    Program("vercel_ai.ts", "TypeScript, Vercel AI SDK", "node"),
    Program("claude_code.sh", "Claude Code, `claude -p`", "claude_code", is_long=True),
    Program("codex.sh", "Codex, `codex exec`", "codex", is_long=True),
    Program("opencode.sh", "opencode, `opencode run`", "opencode", is_long=True),
    Program("qwen_code.sh", "Qwen Code, `qwen -p`", "qwen_code", is_long=True),
    Program("aider.sh", "aider, `aider --message`", "aider", is_long=True),
    Program("mini_swe_agent.sh", "mini-swe-agent, `mini --yolo`", "mini_swe_agent", is_long=True),
    Program("smolagents_agent.py", "smolagents, ToolCallingAgent", "smolagents", is_long=True),
    Program("smolagents_code.py", "smolagents, CodeAgent", "smolagents", is_long=True),
)


def length(ctx: Any) -> float:
    """The measure of programs with long prompts: a random model can learn to say more."""
    return min(1.0, sum(len(message.text) for message in ctx.messages if message.role == "assistant") / 1000)


def install(programs: list[Program]) -> dict[str, str]:
    """Install what the programs need, once. Returns the reason for each set of packages that cannot be installed."""
    failed = {}
    for packages in dict.fromkeys(program.packages for program in programs):
        folder = BUILD / packages
        if (folder / "ready").exists():
            continue
        try:
            if packages in NPM_FOLDERS:
                _install_node(folder, NPM_FOLDERS[packages])
            else:
                _install_python(folder, VIRTUAL_ENVIRONMENTS[packages])
            (folder / "ready").touch()
        except (OSError, subprocess.CalledProcessError) as error:
            failed[packages] = f"not installed here: {error}"[:300]
    if NODE.is_dir():  # Node looks packages up beside the program
        for file in ("catalogue.json", *(p.file for p in PROGRAMS if p.packages == "node")):
            shutil.copy(EXAMPLES / file, NODE / file)
    return failed


def _install_python(folder: Path, packages: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)


def _install_node(folder: Path, packages: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')
    subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True)


def make_long_model() -> None:
    """A model of one small layer for the prompts of coding agents, up to 40,000 tokens, with palestra/tiny's tokenizer.

    Its weights are random, but for a constant dimension by which one token in ten ends the turn.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny = ROOT / "src" / "palestra" / "models" / "tiny"
    known = json.loads((tiny / "config.json").read_text())
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=known["vocab_size"],
            eos_token_id=known["eos_token_id"],
            pad_token_id=known["pad_token_id"],
            bos_token_id=None,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=LONG_CONTEXT,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.5)[:, 0] = 1.0
        model.lm_head.weight.normal_(std=0.2)
        model.lm_head.weight[known["eos_token_id"]] = torch.tensor([3.1] + [0.0] * 63)
    model.save_pretrained(LONG_MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, LONG_MODEL / name)


def train(program: Program, section: str) -> Row:
    """One training, as a user starts it; gives what docs/agents_table.md says of it."""
    began = time.monotonic()
    command = [sys.executable, "-m", "palestra", "train", "--agent-cmd", program.command(), "--json"]
    command += [*SETTINGS[section].split(), "--output_dir", str(BUILD / "runs")]
    if program.is_long:
        command += ["--model.name", str(LONG_MODEL), "--measure", f"{Path(__file__).resolve()}:length"]
    path = os.pathsep.join([str(program.executables), os.environ["PATH"]])
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": path}
    log = BUILD / f"{program.file}.log"
    with log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, env=env, timeout=LIMIT_S, check=False)
    row: Row = {"file": program.file, "processors": os.cpu_count(), "seconds": round(time.monotonic() - began)}
    if done.returncode:
        last = log.read_text().strip().splitlines()
        return row | {"error": (last or ["no output"])[-1][:300]}
    return row | _results(json.loads(done.stdout.splitlines()[-1]))


def _results(summary: Row) -> Row:
    folder = Path(summary["run_dir"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    attempts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    rows = [step["agent/rows_per_attempt"] for step in steps if "agent/rows_per_attempt" in step]
    prompts = [len(attempt["turns"][0]["token_ids"]) for attempt in attempts if attempt["turns"]]
    return {
        "before": summary["held_out_before"],
        "after": summary["held_out_after"],
        "rows": sum(rows) / max(1, len(rows)),
        "retokenised": sum(step.get("agent/retokenised_turns", 0.0) for step in steps),
        "losses": [step.get("loss", 0.0) for step in steps],  # of equal rewards there is none
        "attempts": len(attempts),
        "ended": sum(attempt["error"] is None for attempt in attempts),
        "prompt_tokens": max(prompts, default=0),
    }


def problem(section: str, row: Row) -> str:
    """Reason a program's row is not good enough; empty if it is."""
    if "error" in row:
        return str(row["error"])
    if row["retokenised"]:
        return f"{row['retokenised']:.0f} turns were tokenised again"
    if section == LEARN:
        good = row["before"] <= BEFORE_AT_MOST and row["after"] >= AFTER_AT_LEAST
        return "" if good else f"did not come from {BEFORE_AT_MOST:.0%} to {AFTER_AT_LEAST:.0%}"
    if row["ended"] < row["attempts"]:
        return f"{row['attempts'] - row['ended']} of {row['attempts']} attempts failed"
    return "" if len(row["losses"]) == STEPS and any(row["losses"]) else "three steps with a gradient were expected"


def table(section: str, rows: dict[str, Row], old: list[str]) -> list[str]:
    """The table of a section; programs that were not run keep their old line."""
    columns = "before | after"
    if section != LEARN:
        columns = "attempts that ended by themselves | tokens of the first prompt | loss of the steps"
    lines = [
        f"| program | what it is | {columns} | rows per attempt | re-tokenised turns | processors | seconds |",
        f"| --- | --- |{' ---: |' * (columns.count('|') + 1)} ---: | ---: | ---: | ---: |",
    ]
    known = {line.split(" | ")[0].removeprefix("| "): line for line in old}
    for program in PROGRAMS:
        if program.file in rows:
            cells = _cells(rows[program.file], section, columns.count("|") + 5)
            lines.append(f"| {program.file} | {program.about} | {' | '.join(cells)} |")
        elif program.file in known:
            lines.append(known[program.file])
    return lines


def _cells(row: Row, section: str, count: int) -> list[str]:
    if "error" in row:
        return [str(row["error"]).replace("|", "/"), *[""] * (count - 1)]
    end = [f"{row['rows']:.2f}", f"{row['retokenised']:.0f}", str(row["processors"]), str(row["seconds"])]
    if section == LEARN:
        return [f"{row['before']:.1%}", f"{row['after']:.1%}", *end]
    losses = ", ".join(f"{loss:.2f}" for loss in row["losses"])
    return [f"{row['ended']} of {row['attempts']}", f"{row['prompt_tokens']:,}", losses, *end]


def write_page(section: str, rows: dict[str, Row]) -> None:
    """Replace the rows of a section's table; its text and the other sections stay as they are."""
    head, heading, rest = PAGE.read_text().partition(f"## {section}\n")
    own, *others = rest.split("\n## ", 1)
    lines = own.rstrip("\n").split("\n")
    old = [line for line in lines if line.startswith("| ")]
    text = [line for line in lines if not line.startswith("| ")]
    body = "\n".join([*text, *table(section, rows, old)]) + "\n"
    PAGE.write_text(head + heading + body + "".join(f"\n## {other}" for other in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="files of examples/agents; default all")
    parser.add_argument("--learn", action="store_true", help="until the demo is learned, instead of three steps")
    parser.add_argument("--jobs", type=int, default=1, help="programs that are trained at once")
    options = parser.parse_args()
    if unknown := set(options.programs) - {p.file for p in PROGRAMS}:
        parser.error(f"{', '.join(sorted(unknown))}: no program of examples/agents that this script knows")
    chosen = [p for p in PROGRAMS if not options.programs or p.file in options.programs]
    if options.learn:
        chosen = [p for p in chosen if not p.is_long]
    failed_installs = install(chosen)
    make_long_model()
    sections = [LEARN if options.learn else program.section for program in chosen]

    def one(program: Program, section: str) -> Row:
        reason = failed_installs.get(program.packages)
        return {"file": program.file, "error": reason} if reason else train(program, section)

    problems = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(one, chosen, sections)
        for program, section, row in zip(chosen, sections, rows, strict=True):
            print(json.dumps(row), flush=True)
            if reason := problem(section, row):
                problems[program.file] = reason
            write_page(section, {program.file: row})
    if problems:
        sys.exit("\n".join(f"{file}: {reason}" for file, reason in problems.items()))


if __name__ == "__main__":
    main()
