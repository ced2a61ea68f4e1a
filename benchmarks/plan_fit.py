"""The constants of `palestra plan`, fitted to rows that `benchmarks/plan.py` measured.

    python benchmarks/plan.py | tee rows.txt; python benchmarks/plan_fit.py rows.txt      a second, on any machine
    python benchmarks/plan_fit.py --recorded    the rows of tests/unit/plan, whose phases were not kept
    python benchmarks/plan_fit.py --made-up     rows made by other constants, to see that these are found again

Least squares over the phases of all rows, each in shares of its step, and over decode and learner steps measured alone
(DECODE and LEARNER below); constants that the rows do not show stay where they were. Prints ratios before and after,
what to put into plan/device.py, plan/step_time.py and plan/memory.py, and the rows for tests/unit/plan and the
documents.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from plan import ROW, SHAPES, table

from palestra.plan import memory, step_time
from palestra.plan.device import DEVICES, GIB, GPU_EFFICIENCY
from palestra.plan.estimate import RunEstimate, estimate
from palestra.plan.shape import find_shape
from palestra.plan.work import StepWork

# of an efficiency; the others are fitted. A prefill's share decides about decode steps of many rows, too
FIXED = ("bandwidth_share", "prefill_flop_share", "host_step_s", "origin")
MODULES = {
    **dict.fromkeys(("SHARED_RATE", "SIBLINGS_RATE", "NARROW_HEADS", "LORA_LAUNCHES"), step_time),
    **dict.fromkeys(("WORKSPACE", "LORA_LAYERS"), memory),
}
STIFFNESS = 0.03  # of a constant's logarithm beside errors in shares of a step
SHARES = ("learner_flop_share", "attention_flop_share", "NARROW_HEADS")  # at most 1
# what phases a part of the plan is; decode steps are behind prefills on the GPU, so the host waits for both in one
PHASES = {
    "decode": ("prefill", "decode", "planning"),
    "agent loop": ("template", "agent_loop"),
    "learner": ("learner",),
}
# rows of the 0.6B shape with prompts of 352 tokens: tokens/s of decode steps alone, all weights and LoRA of rank 8
DECODE = [(64, 33253, 22359), (256, 61345, 49332), (512, 70068, 60939)]
# learner.py's steps alone: model, groups, siblings, tokens of prompt, sampled, and of a micro-batch; seconds
LEARNER = [("qwen3-0.6b", 32, 1, 1, 511, 16384, 0.163)]
Constants = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A measured step: what it did, seconds, GiB, and the seconds of its phases, if they were kept."""

    model: str
    rank: int
    work: StepWork
    seconds: float
    gib: float
    parts: dict[str, float]
    computed: float  # tokens by the learner; 0 where it is not known

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Row:
        phases = data.get("phases_s", {})
        parts = {part: sum(phases.get(name, 0.0) for name in names) for part, names in PHASES.items() if phases}
        if parts:
            parts["rest"] = data["measured_s"] - sum(parts.values())
        work = StepWork(
            problems=data["problems"],
            group_size=data["group"],
            prompt_tokens=data["prompt"],
            new_tokens=data["new"],
            kv_memory_gib=data["kv_gib"],
            tokens_per_micro_batch=data["micro_batch"],
            method="lora" if data["lora"] else "full",
            lora_rank=data["lora"] or 1,
        )
        return cls(
            data["model"],
            data["lora"],
            work,
            data["measured_s"],
            data["measured_gib"],
            parts,
            data.get("tokens_computed") or 0.0,
        )

    def plan(self, constants: Constants) -> RunEstimate:
        return planned(SHAPES[self.model], self.work, constants)


def planned(model: str, work: StepWork, constants: Constants) -> RunEstimate:
    reached = replace(GPU_EFFICIENCY, **{k: v for k, v in constants.items() if k not in MODULES})
    return estimate(find_shape(model), DEVICES["h200"], work, reached)


def present() -> Constants:
    own = {f.name: getattr(GPU_EFFICIENCY, f.name) for f in fields(GPU_EFFICIENCY) if f.name not in FIXED}
    return own | {name: getattr(module, name) for name, module in MODULES.items()}


@contextmanager
def used(constants: Constants) -> Iterator[None]:
    """Those that are no efficiency are set in their modules inside."""
    before = {name: getattr(module, name) for name, module in MODULES.items()}
    try:
        for name, module in MODULES.items():
            setattr(module, name, constants[name])
        yield
    finally:
        for name, value in before.items():
            setattr(MODULES[name], name, value)


def parts_of(found: RunEstimate) -> dict[str, float]:
    parts = dict(found.time.parts)
    parts["decode"] += parts.pop("prefill")
    parts["learner"] += parts.pop("optimizer")
    parts["rest"] += parts.pop("communication")
    return parts


def errors(rows: Sequence[Row], constants: Constants) -> list[float]:
    """In shares of a step's time, of its memory, and of the time of decode and learner steps alone."""
    found: list[float] = []
    with used(constants):
        for row in rows:
            plan = row.plan(constants)
            found.append(plan.time.total_s / row.seconds - 1)
            parts = parts_of(plan)
            found += [(parts[name] - seconds) / row.seconds for name, seconds in row.parts.items()]
            if row.gib:
                found.append(plan.memory.total / GIB / row.gib - 1)
        for count, full, lora in DECODE:
            alone = StepWork(problems=count, group_size=1, prompt_tokens=352, new_tokens=64)
            for work, per_s in ((alone, full), (replace(alone, method="lora", lora_rank=8), lora)):
                step_s = planned("qwen3-0.6b", work, constants).time.decode.step_s
                found.append(0.5 * (step_s * per_s / count - 1))
        for model, *sizes, micro_batch, seconds in LEARNER:
            time = planned(model, StepWork(*map(int, sizes), tokens_per_micro_batch=int(micro_batch)), constants).time
            found.append(0.5 * ((time.learner_s + time.optimizer_s) / seconds - 1))
    return found


def fit(rows: Sequence[Row], start: Constants) -> Constants:
    """Levenberg and Marquardt's steps in the constants' logarithms, held by a spring to where they start."""
    names = list(start)

    def of(x: np.ndarray) -> Constants:
        return {name: start[name] * float(np.exp(v)) for name, v in zip(names, x, strict=True)}

    def residuals(x: np.ndarray) -> np.ndarray:
        found = of(x)
        beyond = [max(0.0, np.log(found[name] / 0.95)) for name in SHARES]
        return np.array([*errors(rows, found), *(STIFFNESS * x), *beyond])

    return of(least_squares(residuals, np.zeros(len(names))))


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    damping, now = 1e-2, residuals(x)
    for _ in range(200):
        slope = np.stack([(residuals(x + step) - now) / 1e-4 for step in np.eye(len(x)) * 1e-4], axis=1)
        while damping < 1e6:
            change = np.linalg.solve(slope.T @ slope + damping * np.eye(len(x)), -slope.T @ now)
            new = residuals(x + change)
            if new @ new < now @ now:
                break
            damping *= 4
        else:
            return x
        if now @ now - new @ new < 1e-10:
            return x + change
        x, now, damping = x + change, new, damping / 3
    return x


def rounded(constants: Constants) -> Constants:
    return {name: float(f"{value:.2g}") for name, value in constants.items()}


def print_ratios(rows: Sequence[Row], before: Constants, after: Constants) -> None:
    print(f"{'':32}{'measured':>16}{'planned before':>20}{'ratio':>14}{'planned after':>20}{'ratio':>14}")
    worst: list[tuple[float, float]] = []
    for row in rows:
        texts = [f"{row.seconds:.2f} s {row.gib:5.1f} GiB"]
        for constants in (before, after):
            with used(constants):
                found = row.plan(constants)
            seconds, gib = found.time.total_s, found.memory.total / GIB
            ratios = seconds / row.seconds, gib / row.gib if row.gib else 1.0
            texts += [f"{seconds:.2f} s {gib:5.1f} GiB", f"{ratios[0]:.2f} {ratios[1]:.2f}"]
        worst.append(ratios)
        work = row.work
        name = f"{row.model} {'lora' if row.rank else 'full'} {work.problems} x {work.group_size}"
        print(f"{name + f' {work.prompt_tokens} + {work.new_tokens}':32}{texts[0]:>16}"
              f"{texts[1]:>20}{texts[2]:>14}{texts[3]:>20}{texts[4]:>14}")  # fmt: skip
    time_off, memory_off = (max(abs(ratio - 1) for ratio in column) for column in zip(*worst, strict=True))
    print(f"furthest off after the fit: {time_off:.0%} of time (25 % asked), {memory_off:.0%} of memory (15 %)")


def print_parts(rows: Sequence[Row], constants: Constants) -> None:
    """Where the time is, measured and planned, in milliseconds; of memory the plan alone."""
    for row in rows:
        with used(constants):
            found = row.plan(constants)
        planned_parts = parts_of(found)
        parts = [f"{name} {1e3 * s:.0f}/{1e3 * planned_parts[name]:.0f}" for name, s in row.parts.items()]
        sizes = [f"{f.name} {getattr(found.memory, f.name) / GIB:.1f}" for f in fields(found.memory)
                 if f.name != "kv_sleeps" and getattr(found.memory, f.name)]  # fmt: skip
        packed = found.work.packed
        print(
            f"{row.model} {row.rank}: {packed.tokens} tokens ({row.computed:.0f} were computed) in "
            f"{packed.micro_batches} micro-batches, the largest of {packed.largest}"
        )
        print(f"    ms {', '.join(parts) or 'not kept'}\n    GiB {', '.join(sizes)}")


def print_constants(before: Constants, after: Constants) -> None:
    for name, value in after.items():
        if name == "WORKSPACE":
            print(f"    plan/memory.py     WORKSPACE = {value / GIB:.2g} * GIB  # {before[name] / GIB:.2g} before")
        else:
            module = MODULES[name].__name__.rpartition(".")[2] if name in MODULES else "device"
            file = f"plan/{module}.py"
            print(f"    {file:18} {name}={value:g}  # {before[name]:g} before")


def print_tuples(rows: Sequence[Row]) -> None:
    for row in rows:
        work = row.work
        figures = [work.problems, work.group_size, work.prompt_tokens, work.new_tokens, work.tokens_per_micro_batch]
        tail = f"{round(work.kv_memory_gib or 0.0, 2)}, {round(row.seconds, 2)}, {round(row.gib, 2)}"
        print(f'    ("{SHAPES[row.model]}", {row.rank}, {", ".join(map(str, figures))}, {tail}),')


def rows_in(paths: Sequence[str]) -> list[dict[str, Any]]:
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    found = [json.loads(line[line.index(ROW) + len(ROW) :]) for line in lines if ROW in line]
    return [row for row in found if row.get("model") in SHAPES]


def recorded() -> list[dict[str, Any]]:
    """The rows of the test."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "plan"))
    from test_estimate import MEASURED

    step_time.MIN_SAVED_BYTES = 1 << 60  # measured before siblings read their prompt once

    names = {long: short for short, long in SHAPES.items()}
    keys = ("lora", "problems", "group", "prompt", "new", "micro_batch", "kv_gib", "measured_s", "measured_gib")
    return [{"model": names[model], **dict(zip(keys, figures, strict=True))} for model, *figures in MEASURED]


def made_up(rows: Sequence[Row], scale: float) -> list[Row]:
    """What these rows would have measured, were every constant another."""
    chance = np.random.default_rng(0)
    other = {name: value * float(scale ** chance.uniform(-1, 1)) for name, value in present().items()}
    other |= {name: min(other[name], 0.9) for name in SHARES}
    found = []
    with used(other):
        for row in rows:
            plan = row.plan(other)
            noise = {name: value * chance.uniform(0.95, 1.05) for name, value in parts_of(plan).items()}
            seconds, gib = sum(noise.values()), plan.memory.total / GIB * chance.uniform(0.98, 1.02)
            found.append(replace(row, seconds=seconds, gib=gib, parts=noise))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="what plan.py printed")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--made-up", action="store_true")
    arguments = parser.parse_args()
    data = rows_in(arguments.files) if arguments.files else recorded()
    rows = [Row.of_json(row) for row in data]
    rows = made_up(rows, 1.6) if arguments.made_up else rows
    before = present()
    after = rounded(fit(rows, before))
    print_ratios(rows, before, after)
    print_constants(before, after)
    print_parts(rows, after)
    print("for tests/unit/plan:")
    print_tuples(rows)
    if arguments.files:
        tabulate(data, rows, after)


def tabulate(data: Sequence[dict[str, Any]], rows: Sequence[Row], constants: Constants) -> None:
    """The table of the documents, with the new plan."""
    new = []
    for found, row in zip(data, rows, strict=True):
        with used(constants):
            plan = row.plan(constants)
        seconds, gib = plan.time.total_s, plan.memory.total / GIB
        ratios = {"time_ratio": round(seconds / row.seconds, 2), "memory_ratio": round(gib / row.gib, 2)}
        new.append(found | ratios | {"planned_s": seconds, "planned_gib": gib})
    table(new)


if __name__ == "__main__":
    main()
