"""rl_test_inference: the attempts of several models side by side, each in a process without our secrets."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.errors import NotAllowedError, SettingError, UnsupportedError
from palestra.core.files import new_folder, open_private, read_jsonl, write_json
from palestra.core.group_codec import NOT_TRAINED
from palestra.core.secrets import clean_environment
from palestra.extras.agent_tools.answers import short
from palestra.extras.agent_tools.endpoints import Candidate, Relay, choose_models
from palestra.extras.agent_tools.pending_run import PendingRunConfig

_TOKEN_VARIABLE = "PALESTRA_RELAY_TOKEN"
_POLL_S = 0.2
_TOKENS = ("prompt_tokens", "completion_tokens", "cost_usd")


@dataclass(frozen=True)
class InferenceTest:
    """A test of several models; `progress` is called with each finished problem."""

    draft: PendingRunConfig
    num_steps: int
    group_size: int
    home: Path
    progress: Callable[[float, float, str], None]
    cancelled: threading.Event

    def run(self, names: Sequence[str] | None) -> Mapping[str, Any]:
        """Test models by their names; one that fails or times out does not affect the others' results."""
        limits, env = self.draft.site.limits, self.draft.env
        models = choose_models(names, self.draft.site, str(self.draft.value("model.name")))
        if self.num_steps < 1 or self.group_size < 2:
            raise SettingError(
                f"num_steps={self.num_steps}, group_size={self.group_size}; "
                "expected at least 1 problem and 2 attempts at each"
            )
        if self.num_steps * self.group_size > limits.test_completions:
            raise NotAllowedError(
                f"num_steps × group_size = {short(self.num_steps * self.group_size)} attempts a model; "
                f"this site allows {limits.test_completions}. Ask for fewer"
            )
        local = [model.label for model in models if model.base_url is None]
        if local and env.dialect != "palestra":
            raise UnsupportedError(
                f"{env.name} is written for {env.dialect}, and asks its model over HTTP: serve it "
                f"with `palestra serve {local[0].removeprefix('local:')}`, and name it NAME@http://127.0.0.1:PORT/v1"
            )
        # a new folder each time: no older output can be taken for this test's
        folder = new_folder(self.home / "inference_tests", env.name, "set PALESTRA_HOME to a folder of yours")
        folder.chmod(0o700)
        began, finished, lock = time.perf_counter(), dict.fromkeys(range(len(models)), -1), threading.Lock()

        def note(index: int, count: int, relay: Relay) -> None:
            with lock:
                if finished[index] != count:
                    finished[index] = count
                    requests = f", {relay.requests} requests" if relay.requests else ""
                    text = f"{models[index].label}: {count} of {self.num_steps} problems{requests}"
                    self.progress(sum(max(0, each) for each in finished.values()), len(models) * self.num_steps, text)

        with ThreadPoolExecutor(limits.test_models_at_once, "palestra-test") as pool:
            rows = list(pool.map(lambda index: self._test(index, models[index], folder, note), range(len(models))))
        sizes = {"num_steps": self.num_steps, "group_size": self.group_size}
        summary = _summary(rows, time.perf_counter() - began)
        return {
            "environment": env.name,
            "environment_file": env.file_path,
            "test_config": sizes,
            "models_tested": [row["model"] for row in rows],
            **sizes,
            "results": rows,
            "summary": {**summary, "steps_requested": self.num_steps, "output_directory": folder},
            "folder": folder,
        }

    def _test(
        self, index: int, model: Candidate, folder: Path, note: Callable[[int, int, Relay], None]
    ) -> dict[str, Any]:
        began, limits = time.perf_counter(), self.draft.site.limits
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in model.label)[:80]
        output, log_file, settings = (folder / f"{index}-{name}.{kind}" for kind in ("jsonl", "log", "settings.json"))
        turns = 1 + int(self.draft.value("rollout.max_tool_rounds"))
        relay = Relay(model, limits.test_minutes * 60, limits.test_completions * turns)
        try:
            with relay.running():
                write_json(settings, self._settings(model, relay.url))
                state, error = self._run_process(
                    settings, output, log_file, relay.token, lambda count: note(index, count, relay)
                )
        except Exception as failure:  # this model's alone
            state, error = "failed", f"{type(failure).__name__}: {failure}"
        records = list(read_jsonl(output))
        note(index, len(records), relay)
        tokens: dict[str, Any] = {name: getattr(relay, name) for name in _TOKENS}
        if model.base_url is None:
            masks = [mask for record in records for row in record["masks"] for mask in row]
            sampled = sum(mask != NOT_TRAINED for mask in masks)
            tokens = dict(zip(_TOKENS, (len(masks) - sampled, sampled, 0.0), strict=True))
        return {
            "model": model.label,
            "scale": model.scale,
            "endpoint": model.base_url or "local",
            "status": state,
            **({"error": error} if error else {}),
            **_scores(records),
            **tokens,
            "seconds": round(time.perf_counter() - began, 1),
            "log_file": log_file,
            "output_file": output,
        }

    def _run_process(
        self, settings: Path, output: Path, log_file: Path, token: str, note: Callable[[int], None]
    ) -> tuple[str, str | None]:
        """Run one model's process until it ends, times out or is cancelled; its state, and the error if it failed."""
        if self.cancelled.is_set():
            return "cancelled", None
        arguments = (self.draft.environment, "--config", settings, "--groups", self.num_steps, "--out", output)
        minutes, code = self.draft.site.limits.test_minutes, None
        with open_private(log_file) as log:
            environ = {**clean_environment(), _TOKEN_VARIABLE: token, children.END_WITH_PARENT: "1"}
            command = children.isolated("-m", "palestra", "env", "process", *arguments)
            child = children.start(command, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log)
        until = time.monotonic() + minutes * 60
        try:
            while code is None and time.monotonic() < until and not self.cancelled.is_set():
                try:
                    code = child.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    note(sum(1 for _ in read_jsonl(output)))
        finally:
            children.end(child)
        if self.cancelled.is_set():
            return "cancelled", None
        if code is None:
            return "timed out", f"it took longer than {minutes:g} minutes; what was finished by then is counted"
        if code == 0:
            return "completed", None
        lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("Error: ")] or lines or [f"exit code {code}"]
        return "failed", short(errors[-1].removeprefix("Error: "), 500)

    def _settings(self, model: Candidate, url: str) -> dict[str, Any]:
        """The edited settings, for the process that makes the attempts. They hold no key."""
        draft, limits = self.draft, self.draft.site.limits
        run = {k: v for k, v in draft.settings().items() if k.partition(".")[0] in ("rollout", "seed", "model")}
        # whole groups are written one after the other: small batches leave more behind when time is up
        together = max(1, limits.test_requests_at_once // self.group_size)
        run |= {"rollout.group_size": self.group_size, "train.problems_per_step": together}
        same = {f.name: self.group_size for f in draft.fields.values() if f.also == "rollout.group_size"}
        settings = {**run, "env": {**draft.env_settings(), **same}}  # JSON is YAML, too
        if model.base_url is None:
            return {**settings, "model.name": model.name}
        openai = {
            "model_name": model.name,
            "base_url": url,
            "api_key_env": _TOKEN_VARIABLE,
            "timeout_s": limits.test_minutes * 60,
            "max_concurrent": limits.test_requests_at_once,
        }
        return {**settings, "openai": openai}


def _scores(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy and scores. Correct means passed; for atroposlib, which has no verdict, a score of 1 or more."""
    groups = [record.get("passed") or [score >= 1 for score in record["scores"]] for record in records]
    passed = [flag for group in groups for flag in group]
    scores = [score for record in records for score in record["scores"]]
    solved = [any(group) for group in groups]
    steps = [
        {"step": i, "completions": len(group), "correct": sum(group), "scores": record["scores"]}
        for i, (group, record) in enumerate(zip(groups, records, strict=True), start=1)
    ]
    return {
        "steps": steps,
        "steps_tested": len(records),
        "steps_with_correct": sum(solved),
        **dict.fromkeys(("completions", "total_completions"), len(passed)),  # the same, as other tools call it
        **dict.fromkeys(("correct", "correct_completions"), sum(passed)),
        "accuracy": _mean(passed),
        "step_success_rate": _mean(solved),
        "mean_score": _mean(scores),
    }


def _summary(rows: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    tested = [row for row in rows if row["completions"]]
    best = max(tested, key=lambda row: (row["accuracy"], row["mean_score"]), default={})
    costs = [row["cost_usd"] for row in rows if row["cost_usd"] is not None]
    return {
        "best_model": best.get("model"),
        "best_accuracy": best.get("accuracy"),
        "models_tested": len(tested),
        "models_succeeded": sum(row["status"] == "completed" for row in rows),
        "avg_accuracy": _mean([row["accuracy"] for row in tested]),
        "environment_working": bool(tested),
        **{name: sum(row[name] for row in rows) for name in ("completions", "prompt_tokens", "completion_tokens")},
        "cost_usd": sum(costs) if costs else None,
        "seconds": round(seconds, 1),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
