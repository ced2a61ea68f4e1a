"""Large shapes, QLoRA and constrained tool calls at default settings: three steps of `palestra train` each, on one GPU.

    python benchmarks/shapes.py --logs FOLDER                        all cases, about 10 minutes on an H200
    python benchmarks/shapes.py 8b-lora 8b-qlora --logs FOLDER       some of them; --list names all
    python benchmarks/shapes.py --tiny --logs FOLDER                 the same script with tiny models, on a CPU too

A row for each case: seconds of each step, the peak of torch's allocator, which paths were taken, warnings; or the
error, and the next case goes on. Random weights are saved as a model folder first, and loaded as a user's would be; a
turn ends after 600 tokens on average. Besides what a case is about, and the number of steps, three settings are not
the defaults: 16 held-out cases instead of 100 (evaluating is not what is measured), two solved examples in the
calculator's prompts (SmolLM2 calls no tools without), and where the run folder is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_models import TINY, save_model

from palestra.plan.shape import ModelShape, find_shape

ROW = "row: "
TURN_TOKENS, TEMPERATURE = 600, 0.8  # of random models; the temperature is the default
NOISE = Path(__file__).with_name("noise.py")
CALCULATOR = {"env.shots": 2}
MANY = {  # benchmarks/training.py's
    "train.problems_per_step": 64,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 96,
    "rollout.max_tool_rounds": 2,
}


@dataclass(frozen=True)
class Case:
    """One `palestra train`: a shape of random weights, or a model that there is, and the settings that it is about."""

    settings: Mapping[str, Any]
    shape: str | None = None
    model: str = "palestra/smollm2"
    env: str = "calculator"
    checks: Mapping[str, Any] = field(default_factory=dict)  # fields of the row that must have these values


CASES = {
    "8b-lora": Case({"lora.r": 16}, "qwen3-8b", env=str(NOISE)),
    "8b-qlora": Case({"lora.load_in_4bit": True}, "qwen3-8b", env=str(NOISE), checks={"policy": "LocalPolicy"}),
    "1.7b-full": Case({}, "qwen3-1.7b", env=str(NOISE)),
    "qlora": Case({"lora.load_in_4bit": True, **CALCULATOR}, checks={"policy": "LocalPolicy", "learner": "trees"}),
    "constrained": Case({"rollout.constrain_tool_calls": True, **CALCULATOR}, checks={"calls_not_read": 0}),
    "unconstrained": Case(CALCULATOR),
    "constrained-512": Case({"rollout.constrain_tool_calls": True, **CALCULATOR, **MANY}, checks={"calls_not_read": 0}),
    "unconstrained-512": Case({**CALCULATOR, **MANY}),
}
ALWAYS = {"train.max_steps": 3, "eval.cases": 16}
TINY_SETTINGS = {"rollout.max_new_tokens": 48, "train.problems_per_step": 2, "rollout.group_size": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--logs", type=Path, required=True, help="where each case's output goes")
    parser.add_argument("--work", type=Path, help="where models and runs go meanwhile (up to 40 GB); default: /tmp")
    parser.add_argument("--limit-s", type=float, default=330, help="seconds that one case may take")
    parser.add_argument("--budget-s", type=float, default=1e9, help="seconds after which no case is begun")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--list", action="store_true")
    if "--list" in sys.argv:
        print(*CASES, sep="\n")
        return 0
    if "--save" in sys.argv[1:2]:
        save(*sys.argv[2:])
        return 0
    if "--train" in sys.argv[1:2]:
        train(Path(sys.argv[2]), sys.argv[3:])
        return 0
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=arguments.work))
    began, rows = time.perf_counter(), []
    try:
        for name in arguments.cases or CASES:
            left = arguments.budget_s - (time.perf_counter() - began)
            if left < 20:
                rows.append({"case": name, "error": "not begun: --budget-s is over"})
            else:
                rows.append(run_case(name, arguments, work, min(arguments.limit_s, left)))
            print(ROW + json.dumps(rows[-1]), flush=True)
            (arguments.logs / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report(rows)


def run_case(name: str, arguments: argparse.Namespace, work: Path, limit_s: float) -> dict[str, Any]:
    """Build the model unless the last case had it, train, and read the row."""
    case, began = CASES[name], time.perf_counter()
    log = arguments.logs / f"{name}.log"
    log.write_text("")
    model = "palestra/tiny" if arguments.tiny else case.model
    if case.shape is not None:
        folder = work / ("tiny" if arguments.tiny else case.shape)
        for other in work.iterdir():  # one model at a time: an 8B folder has 16 GB
            if other != folder:
                shutil.rmtree(other)
        if not folder.exists():
            shape = "tiny" if arguments.tiny else case.shape
            if error := run_logged([sys.executable, __file__, "--save", shape, str(folder)], log, limit_s):
                shutil.rmtree(folder, ignore_errors=True)
                return {"case": name, "error": f"building the model: {error}", "log_tail": tail(log)}
        model = str(folder)
    built_s = time.perf_counter() - began
    run = work / f"run-{name}"
    settings = {**ALWAYS, **case.settings, **(TINY_SETTINGS if arguments.tiny else {}), "model.name": model}
    options = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    command = [sys.executable, __file__, "--train", str(run), "--env", case.env, *options]
    error = run_logged(command, log, max(20.0, limit_s - built_s))
    found = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(ROW)]
    row: dict[str, Any] = {"case": name, **(json.loads(found[-1].removeprefix(ROW)) if found else steps_of(run))}
    row |= {"build_s": round(built_s, 1), "whole_s": round(time.perf_counter() - began, 1)}
    row["settings"] = {key: value for key, value in settings.items() if key != "model.name"}
    if error:
        row |= {"error": error, "log_tail": tail(log)}
    checks = {"steps": ALWAYS["train.max_steps"], **case.checks}
    wrong = {key: row.get(key) for key, value in checks.items() if row.get(key) != value}
    if wrong and not error:
        row["error"] = f"{wrong}, expected {checks}"
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        if (run / file).exists():
            shutil.copy(run / file, arguments.logs / f"{name}.{file}")
    shutil.rmtree(run, ignore_errors=True)
    return row


def run_logged(command: list[str], log: Path, limit_s: float) -> str | None:
    """Run with all output in the log; what went wrong, or None."""
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"ended after {limit_s:.0f} s, its limit"
    last = next((line for line in reversed(tail(log).splitlines()) if line.strip()), "")
    return None if status == 0 else f"exit status {status}: {last.strip()[:200]}"


def tail(log: Path) -> str:
    return "\n".join(line for line in log.read_text(errors="replace").splitlines() if not line.startswith(ROW))[-1500:]


def save(shape: str, folder: str) -> None:
    import torch

    cuda = torch.cuda.is_available()
    began = time.perf_counter()
    found: ModelShape = TINY if shape == "tiny" else find_shape(shape)
    tokens = TURN_TOKENS if shape != "tiny" else 16
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    save_model(found, Path(folder), device, dtype, tokens, TEMPERATURE)
    print(f"{shape}: {found.parameters / 1e9:.2f} B weights saved in {time.perf_counter() - began:.1f} s", flush=True)


def train(folder: Path, options: list[str]) -> None:
    """`palestra train` in this process, by its own command line, and what it took."""
    import torch

    from palestra.cli.main import run as palestra
    from palestra.train.loop import Training

    warnings: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("palestra").addHandler(Listener(logging.WARNING))
    parts: dict[str, Any] = {}
    run = Training.run

    def noted(training: Training, *args: Any) -> Any:
        parts.update(parts_of(training))
        return run(training, *args)

    Training.run = noted  # type: ignore[method-assign]
    status = None
    try:
        status = palestra(["train", "--folder", str(folder), *options])
    finally:
        row = {**parts, **steps_of(folder), **calls_of(folder), "warnings": warnings}
        if torch.cuda.is_available():
            row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            row["gpu_gib"] = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
        print("\n" + ROW + json.dumps(row), flush=True)
    if status:
        sys.exit(status)


def parts_of(training: Any) -> dict[str, Any]:
    """Which paths sampler and learner have taken."""
    scorer = getattr(training.learner, "_scorer", None)
    engine = getattr(training.policy, "engine", None)
    found: dict[str, Any] = {"policy": type(training.policy).__name__}
    if engine is not None:
        found["sampler"] = "fast decoder" if engine.runner.fast_decoder is not None else "module's layers"
        found["kv_tokens"] = engine.pool.pages * engine.pool.page_size
    if scorer is not None:
        found |= {"learner": scorer.mode, "compiled": scorer.compiled}
    return found


def lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines() if line.strip())


def steps_of(folder: Path) -> dict[str, Any]:
    rows = [row for row in lines(folder / "metrics.jsonl") if "sample_seconds" in row]
    if not rows:
        return {"steps": 0}
    return {
        "steps": len(rows),
        "sample_s": [round(row["sample_seconds"], 2) for row in rows],
        "train_s": [round(row["train_seconds"], 2) for row in rows],
        "sampled_tokens": [round(row["sampled_tokens"]) for row in rows],
        "tokens_trained": [round(row.get("tokens_trained", 0)) for row in rows],
        "tokens_computed": [round(row.get("tokens_computed", 0)) for row in rows],
        "tokens_per_s": round(statistics.median(row["sample_tokens_per_second"] for row in rows[1:] or rows)),
        "grad_norm": [round(row.get("grad_norm", 0.0), 4) for row in rows],
        "kl_sampler": [round(row.get("kl_sampler", 0.0), 5) for row in rows],
        "sampler_gap_mean": [round(row.get("sampler_gap_mean", 0.0), 4) for row in rows],
        "truncation_rate": round(statistics.fmean(row.get("truncation_rate", 0.0) for row in rows), 3),
        "reward_mean": [round(row.get("reward_mean", 0.0), 3) for row in rows],
    }


def calls_of(folder: Path) -> dict[str, Any]:
    """How many tool calls of whole rollouts could not be read, or named a tool or arguments that do not exist."""
    calls = not_read = unknown = 0
    for rollout in lines(folder / "rollouts.jsonl"):
        last = rollout["messages"][-1]
        for message in rollout["messages"]:
            if message is last and rollout["stop"] == "truncated":
                continue  # cut off, perhaps in the middle of a call
            for call in message["tool_calls"]:
                calls += 1
                not_read += call["error"] is not None
                unknown += call["error"] is None and call["name"] not in rollout["tool_names"]
    return {"calls": calls, "calls_not_read": not_read, "calls_unknown": unknown} if calls else {}


def report(rows: list[dict[str, Any]]) -> int:
    heads = "case | steps | sample s | train s | tokens/s | allocated GiB | reserved GiB | sampler | learner | calls | "
    print(f"\n| {heads}warnings, error |")
    print("| --- " * 11 + "|")
    for row in rows:
        calls = f"{row['calls']}, {row['calls_not_read']} not read" if "calls" in row else ""
        learner = f"{row.get('learner', '')}{', compiled' if row.get('compiled') else ''}"
        numbers = (" ".join(map(str, row.get(name, []))) for name in ("sample_s", "train_s"))
        notes = [row["error"]] if "error" in row else []
        notes += [f"{len(row['warnings'])}: {row['warnings'][0][:120]}"] if row.get("warnings") else []
        cells = [row["case"], row.get("steps", 0), *numbers, row.get("tokens_per_s", "")]
        cells += [row.get("allocated_gib", ""), row.get("reserved_gib", ""), row.get("sampler", ""), learner, calls]
        print("| " + " | ".join(str(cell) for cell in [*cells, "; ".join(notes)]) + " |")
    by_name = {row["case"]: row for row in rows}
    for name in ("constrained", "constrained-512"):
        pair = [by_name.get(prefix + name, {}).get("tokens_per_s") for prefix in ("", "un")]
        if all(pair):
            print(f"{name}: {pair[0]} tokens/s, {pair[0] / pair[1]:.2f} of those without a grammar ({pair[1]})")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
