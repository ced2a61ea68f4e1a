"""A trained model as a repository on the Hugging Face hub, with a card: its origin, evaluation and use."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig, flatten
from palestra.core.errors import ServiceError, SettingError
from palestra.core.files import write_json, write_text

# Settings that have a line of their own, and those with names and addresses of the machine.
_OMITTED = {"output_dir", "model.name", "backend", "seed", "stages.traces", "stages.teacher"}
_OMITTED_SECTIONS = ("track.", "ray.", "tinker.", "vllm.", "agent.", "ranks.")
_OMITTED_ENDS = ("_url", "_folder", "_path", "_file")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class HubRepo:
    """A repository that has been uploaded to."""

    name: str
    url: str
    private: bool  # as asked for; one that existed keeps its visibility


def to_hub(
    model: str, repo: str, *, private: bool = True, adapter: bool = False, report: Mapping[str, Any] | None = None
) -> HubRepo:
    """Upload a model and its card; an adapter is merged into its base, unless `adapter`. `report` is the run's.

    The token is that of HF_TOKEN or `hf auth login`; HF_ENDPOINT names another hub.
    """
    from palestra.models.export.hf import read_record, to_hf
    from palestra.models.loading import RECORD, is_adapter  # torch: a wrong repository is reported without it

    check_repo(repo)
    folder = Path(model).expanduser()
    if adapter and not is_adapter(folder):
        raise SettingError(f"{model} is no adapter; leave out --adapter to upload the whole model")
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made, "model")
        shutil.copytree(folder, copy) if adapter else to_hf(model, copy)
        record = read_record(copy)
        # paths of this machine are nobody else's business
        write_json(copy / RECORD, {key: value for key, value in record.items() if key != "source"})
        card = model_card(repo, read_record(folder) | record, report, is_adapter=adapter)
        write_text(copy / "README.md", card)
        return _upload(copy, repo, private)


def check_repo(repo: str) -> None:
    """Raise for a repository or a machine to which nothing can be uploaded, before any work."""
    if not _REPO.fullmatch(repo):
        raise SettingError(f"{repo!r} is no repository of the hub; expected USER/NAME, such as my-name/my-agent")
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise SettingError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or use --to hf for a folder")
    if not get_token():
        raise SettingError("uploading needs a token of the hub that may write; run `hf auth login`, or set HF_TOKEN")


def _upload(folder: Path, repo: str, private: bool) -> HubRepo:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="palestra")
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model trained with Palestra")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        remedy = "; check that the token may write to it (`hf auth whoami`)" if status in (401, 403, 404) else ""
        raise ServiceError(f"the hub refused the upload to {repo} ({_first_line(error)}){remedy}") from error
    except (httpx.HTTPError, OSError, json.JSONDecodeError) as error:
        where = os.environ.get("HF_ENDPOINT", "huggingface.co")
        raise ServiceError(f"the upload to {repo} failed ({_first_line(error)}); is {where} reachable?") from error
    return HubRepo(repo, str(url), private)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def model_card(repo: str, record: Mapping[str, Any], report: Mapping[str, Any] | None, *, is_adapter: bool) -> str:
    """README.md by the run's `palestra.json` and `report.json` (None if these weights were not scored)."""
    from palestra.models.export.hf import agent_section

    base = str((report or {}).get("model") or (record.get("base") or {}).get("name") or "")
    if Path(base).expanduser().exists() or base.startswith(("/", "~", ".")) or base.endswith(".gguf"):
        base = ""  # a path on this machine
    on_hub = "/" in base and not base.startswith("palestra/")  # embedded models
    lines = ["---", *([f"base_model: {json.dumps(base)}"] if on_hub else [])]
    lines += [f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"tags: [{'lora, ' if is_adapter else ''}reinforcement-learning, grpo, tool-use, palestra]"]
    if report and (after := report.get("after")):
        lines += ["model-index:", f"- name: {json.dumps(repo.split('/')[-1])}", "  results:"]
        lines += ["  - task: {type: text-generation}"]
        lines += [f"    dataset: {{name: {json.dumps(str(report['agent']) + ', held-out cases')}, type: custom}}"]
        rate = after["pass_rate"]["rate"]
        lines += [f"    metrics: [{{name: pass rate, type: accuracy, value: {rate:.4f}}}]"]
    lines += ["---", "", f"# {repo.split('/')[-1]}", ""]
    kind = "A LoRA adapter" if is_adapter else "A language model"
    lines += [f"{kind} trained by reinforcement learning with Palestra{f', from `{base}`' if base else ''}.", ""]
    lines += _evaluation(report) if report else ["It has not been scored.", ""]
    lines += _training(report) if report else []
    lines += agent_section(record)
    lines += ["## Use", "", f"`palestra chat {repo}`, `palestra serve {repo}`, or:", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{repo}")']
    with_peft = "  # with peft installed" if is_adapter else ""
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{repo}"){with_peft}', "```"]
    return "\n".join(lines).rstrip() + "\n"


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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
