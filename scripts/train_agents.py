"""`make test-agents`: train palestra/tiny with every program of examples/agents, and write docs/agents_table.md.

Each is a process that knows nothing of Palestra but its environment variables. It must come from at most 35 % to at
least 90 % of the demo's held-out questions. Packages go to build/agents, a virtual environment and an npm folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "agents"
PAGE = ROOT / "docs" / "agents_table.md"
BUILD = ROOT / "build" / "agents"
PYTHON_PACKAGES = [
    "openai>=3", "anthropic>=2", "openai-agents>=0.20", "langgraph>=1", "langchain>=1", "langchain-openai>=1",
    "pydantic-ai-slim[openai]>=2", "smolagents[openai]>=1.20",
]  # fmt: skip
NPM_PACKAGES = ["openai", "ai", "@ai-sdk/openai", "zod", "tsx"]
BEFORE_AT_MOST, AFTER_AT_LEAST = 0.35, 0.90
SETTINGS = "--train.problems_per_step 8 --train.max_steps 14 --eval.cases 60"
LIMIT_S = 7200


@dataclass(frozen=True)
class Program:
    """One example: its file, what it is, and how it is started."""

    file: str
    about: str
    is_node: bool = False
    why_not: str = ""  # why it is not trained here

    def command(self) -> str:
        path = EXAMPLES / self.file
        if not self.is_node:
            return f"{BUILD / 'python' / 'bin' / 'python'} {path}"
        runner = BUILD / "node" / "node_modules" / ".bin" / "tsx" if path.suffix == ".ts" else "node"
        return f"{runner} {BUILD / 'node' / self.file}"


PROGRAMS = (
    Program("openai_chat.py", "OpenAI SDK, Chat Completions"),
    Program("openai_responses.py", "OpenAI SDK, Responses"),
    Program("anthropic_messages.py", "Anthropic SDK, Messages"),
    Program("openai_agents.py", "openai-agents"),
    Program("langgraph_agent.py", "LangGraph"),
    Program("pydantic_ai_agent.py", "pydantic-ai"),
    Program(
        "smolagents_agent.py", "smolagents", why_not="its own prompt has more than the 2,048 tokens of palestra/tiny"
    ),
    Program("openai_node.mjs", "Node, `openai` package", is_node=True),
    Program("vercel_ai.ts", "TypeScript, Vercel AI SDK", is_node=True),
)


def install() -> None:
    """Both folders, once. Node looks packages up beside the program, so programs are copied there."""
    python, node = BUILD / "python", BUILD / "node"
    if not (python / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(python)], check=True)
        subprocess.run([python / "bin" / "pip", "install", "--quiet", *PYTHON_PACKAGES], check=True)
        (python / "ready").touch()
    if shutil.which("npm") and not (node / "ready").exists():
        node.mkdir(parents=True, exist_ok=True)
        (node / "package.json").write_text('{"type": "module"}')
        subprocess.run(["npm", "install", "--silent", *NPM_PACKAGES], cwd=node, check=True)
        (node / "ready").touch()
    for file in ("catalogue.json", *(program.file for program in PROGRAMS if program.is_node)):
        if node.is_dir():
            shutil.copy(EXAMPLES / file, node / file)


def train(program: Program, settings: str) -> dict[str, object]:
    """One training, as a user starts it; gives what docs/agents_table.md says of it."""
    began = time.monotonic()
    fork = "" if program.is_node else " --agent.fork_server true"
    command = [sys.executable, "-m", "palestra", "train", "--agent-cmd", program.command(), "--json"]
    command += f"{settings}{fork} --output_dir {BUILD / 'runs'}".split()
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    log = BUILD / f"{program.file}.log"
    with log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, env=env, timeout=LIMIT_S, check=False)
    row: dict[str, object] = {"file": program.file, "about": program.about, "seconds": round(time.monotonic() - began)}
    if done.returncode:
        last = log.read_text().strip().splitlines()
        return row | {"error": (last or ["no output"])[-1][:300]}
    summary = json.loads(done.stdout.splitlines()[-1])
    steps = [json.loads(line) for line in Path(summary["run_dir"], "metrics.jsonl").read_text().splitlines()]
    rows = [step["agent/rows_per_attempt"] for step in steps if "agent/rows_per_attempt" in step]
    again = [step["agent/retokenised_turns"] for step in steps if "agent/retokenised_turns" in step]
    return row | {
        "before": summary["held_out_before"],
        "after": summary["held_out_after"],
        "rows": sum(rows) / max(1, len(rows)),
        "retokenised": sum(again),
    }


def write_page(rows: list[dict[str, object]], settings: str) -> None:
    lines = [
        "# Programs that were trained as they are",
        "",
        "Written by `make test-agents` (scripts/train_agents.py): each program of examples/agents was trained with"
        f" `palestra train --agent-cmd … {settings}` on a CPU, on the demo's questions, with `palestra/tiny`."
        f" {platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} processors.",
        "",
        "| program | what it is | before | after | rows per attempt | re-tokenised turns | seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: [p.file for p in PROGRAMS].index(str(row["file"]))):
        if "before" in row:
            found = f"{row['before']:.1%} | {row['after']:.1%} | {row['rows']:.2f} | {row['retokenised']:.0f}"
        else:
            found = f"{row.get('error', 'not run')} | | |"
        lines.append(f"| {row['file']} | {row['about']} | {found} | {row.get('seconds', '')} |")
    PAGE.write_text("\n".join(lines) + "\n")


def why_not(program: Program) -> str:
    if program.is_node and not (BUILD / "node" / "ready").exists():
        return "npm is not installed here"
    return program.why_not


def not_run(program: Program) -> dict[str, object]:
    why = f"not trained: {why_not(program)}" if why_not(program) else "not run"
    return {"file": program.file, "about": program.about, "error": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="files of examples/agents; default all")
    parser.add_argument("--settings", default=SETTINGS, help="of the training")
    given = parser.parse_args()
    install()
    results = BUILD / "results.json"
    rows = {row["file"]: row for row in json.loads(results.read_text())} if results.exists() and given.programs else {}
    if unknown := set(given.programs) - {p.file for p in PROGRAMS}:
        parser.error(f"{', '.join(sorted(unknown))}: no program of examples/agents that this script knows")
    chosen = [p for p in PROGRAMS if not why_not(p) and (not given.programs or p.file in given.programs)]
    failed = []
    for program in chosen:
        row = train(program, given.settings)
        rows[program.file] = row
        print(json.dumps(row), flush=True)
        if not (row.get("before", 1.0) <= BEFORE_AT_MOST and row.get("after", 0.0) >= AFTER_AT_LEAST):  # type: ignore[operator]
            failed.append(program.file)
        results.write_text(json.dumps(list(rows.values())))
        everyone = [rows.get(p.file, not_run(p)) for p in PROGRAMS]
        write_page(everyone, given.settings)
    if failed:
        sys.exit(f"did not come from {BEFORE_AT_MOST:.0%} to {AFTER_AT_LEAST:.0%}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
