"""The model card of a trained model: what it was made of, how it was scored, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig, flatten

# Settings that have a line of their own, and those with names and addresses of the machine.
_OMITTED = {"output_dir", "model.name", "backend", "seed", "stages.traces", "stages.teacher"}
_OMITTED_SECTIONS = ("track.", "ray.", "tinker.", "vllm.", "agent.", "ranks.")
_OMITTED_ENDS = ("_url", "_folder", "_path", "_file")


def model_card(repo: str, record: Mapping[str, Any], report: Mapping[str, Any] | None, *, is_adapter: bool) -> str:
    """README.md for a model repository.

    `record` is the run's `palestra.json` and `report` its `report.json` (None if these weights were not scored).
    """
    base = _base_of(record, report)
    metadata = _metadata(repo, base, report, is_adapter=is_adapter)
    lines = ["---", *metadata, "---", "", f"# {repo.split('/')[-1]}", ""]
    kind = "A LoRA adapter" if is_adapter else "A language model"
    lines += [f"{kind} trained by reinforcement learning with Palestra{f', from `{base}`' if base else ''}.", ""]
    lines += _evaluation(report) if report else ["It has not been scored.", ""]
    lines += _training(report) if report else []
    lines += agent_section(record)
    lines += _usage(repo, is_adapter=is_adapter)
    return "\n".join(lines).rstrip() + "\n"


def _base_of(record: Mapping[str, Any], report: Mapping[str, Any] | None) -> str:
    """The base model by its name on the hub or in Palestra; nothing for a path on this machine."""
    name = str((report or {}).get("model") or (record.get("base") or {}).get("name") or "")
    is_path = Path(name).expanduser().exists() or name.startswith(("/", "~", ".")) or name.endswith(".gguf")
    return "" if is_path else name


def _metadata(repo: str, base: str, report: Mapping[str, Any] | None, *, is_adapter: bool) -> list[str]:
    on_hub = "/" in base and not base.startswith("palestra/")  # embedded models
    lines = [f"base_model: {json.dumps(base)}"] if on_hub else []
    lines += [f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"tags: [{'lora, ' if is_adapter else ''}reinforcement-learning, grpo, tool-use, palestra]"]
    after = (report or {}).get("after")
    if report and after:
        rate = after["pass_rate"]
        lines += ["model-index:", f"- name: {json.dumps(repo.split('/')[-1])}", "  results:"]
        lines += ["  - task: {type: text-generation}"]
        lines += [f"    dataset: {{name: {json.dumps(str(report['agent']) + ', held-out cases')}, type: custom}}"]
        lines += [f"    metrics: [{{name: pass rate, type: accuracy, value: {rate['rate']:.4f}}}]"]
    return lines


def _evaluation(report: Mapping[str, Any]) -> list[str]:
    """The table of before and after, with 95 % intervals."""
    before, after = report.get("before"), report.get("after")
    if not before or not after:
        return ["It was not scored on held-out cases.", ""]
    split = {"train": "Cases that it was trained on"}.get(str(after.get("split")), "Held-out cases")
    summary = f"{split}: {after['pass_rate']['n']} attempts, before and after training, with 95 % intervals."
    lines = ["## Evaluation", "", summary, "", "| measure | before | after |", "| --- | --- | --- |"]
    earlier = {measure["name"]: measure for measure in before["measures"]}
    rows = [("all passed", before["pass_rate"], after["pass_rate"])] if len(after["measures"]) != 1 else []
    for measure in after["measures"]:
        key = "mean" if measure.get("graded") else "pass_rate"
        old = earlier.get(measure["name"])
        rows.append((measure["name"], old and old[key], measure[key]))
    return [*lines, *(f"| {_cell(name)} | {_rate(old)} | {_rate(new)} |" for name, old, new in rows), ""]


def _rate(value: Mapping[str, Any] | None) -> str:
    """
    >>> _rate({"n": 28, "passed": 6, "rate": 0.214, "low": 0.102, "high": 0.395})
    '21.4 % (10.2–39.5)'
    """
    if value is None:
        return "–"
    if "rate" in value:
        return f"{value['rate']:.1%} ({100 * value['low']:.1f}–{100 * value['high']:.1f})".replace("%", " %")
    return f"{value['value']:.3g} ({value['low']:.3g}–{value['high']:.3g})"


def _training(report: Mapping[str, Any]) -> list[str]:
    """Steps, time, software, and the settings that differ from the defaults."""
    steps: Sequence[Mapping[str, Any]] = report.get("metrics") or ()
    config, default = flatten(dict(report["config"])), flatten(RunConfig().model_dump(mode="json"))
    environment = report.get("environment") or {}
    rows = {"steps": str(len(steps)), "wall time": f"{report['seconds'] / 60:.1f} min", "seed": str(report["seed"])}
    tokens = sum(row.get("sampled_tokens", 0) for row in steps)
    rows |= {"sampled tokens": f"{tokens:,.0f}"} if tokens else {}
    software = ("device", "palestra", "torch", "transformers")
    rows |= {name: str(environment[name]) for name in software if environment.get(name)}
    for key, value in config.items():
        is_omitted = key in _OMITTED or key.startswith(_OMITTED_SECTIONS) or key.endswith(_OMITTED_ENDS)
        if value != default.get(key) and not is_omitted:
            rows[f"`{key}`"] = json.dumps(value, ensure_ascii=False)
    table = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    return ["## Training", "", "| | |", "| --- | --- |", *table, ""]


def agent_section(record: Mapping[str, Any]) -> list[str]:
    tools = [tool["function"] for tool in record.get("tools") or () if "function" in tool]
    lines = ["## The agent", ""] if tools or record.get("instructions") else []
    if record.get("instructions"):
        lines += ["Its instructions:", "", *(f"> {line}" for line in str(record["instructions"]).splitlines()), ""]
    if tools:
        described = ((tool["name"], str(tool.get("description") or "").partition("\n")[0]) for tool in tools)
        lines += ["Its tools:", "", *(f"- `{name}`: {text}" for name, text in described), ""]
    return lines


def _usage(repo: str, *, is_adapter: bool) -> list[str]:
    code = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        f'model = AutoModelForCausalLM.from_pretrained("{repo}")' + ("  # with peft installed" if is_adapter else ""),
    ]
    return ["## Use", "", f"`palestra chat {repo}`, `palestra serve {repo}`, or:", "", "```python", *code, "```"]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
