"""rl_test_inference: the attempts of several models side by side, each in a process without our secrets."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.errors import NotAllowedError, SettingError, UnsupportedError
from palestra.core.files import new_folder, open_private, read_jsonl, write_json
from palestra.core.group_codec import NOT_TRAINED
from palestra.core.secrets import clean_environment
from palestra.extras.agent_tools.answers import short
from palestra.extras.agent_tools.endpoints import Candidate, Relay, Usage
from palestra.extras.agent_tools.pending_run import PendingRunConfig

_TOKEN_VARIABLE = "PALESTRA_RELAY_TOKEN"
_POLL_S = 0.2


@dataclass(frozen=True)
class InferenceTest:
    """A test of several models; `progress` is called with each finished problem."""

    draft: PendingRunConfig
    num_steps: int
    group_size: int
    home: Path
    progress: Callable[[float, float, str], None]
    cancelled: threading.Event

    def run(self, models: Sequence[Candidate]) -> Mapping[str, Any]:
        """Test all models; one that fails or times out does not affect the others' results."""
        self._require_bounds()
        local = [model.label for model in models if model.base_url is None]
        if local and self.draft.found.dialect != "palestra":
            found = self.draft.found
            raise UnsupportedError(
                f"{found.name} is written for {found.dialect}, and asks its model over HTTP: serve it "
                f"with `palestra serve {local[0].removeprefix('local:')}`, and name it NAME@http://127.0.0.1:PORT/v1"
            )
        limits = self.draft.site.limits
        # new each time: no older output can be taken for this test's
        remedy = "set PALESTRA_HOME to a folder of yours"
        folder = new_folder(self.home / "inference_tests", self.draft.found.name, remedy)
        folder.chmod(0o700)
        turns = 1 + int(self.draft.value("rollout.max_tool_rounds"))
        relay = Relay(models, limits.test_minutes * 60, limits.test_completions * turns)
        steps = _Steps(self.num_steps, len(models) * self.num_steps, self.progress)
        began = time.perf_counter()
        with relay.running(), ThreadPoolExecutor(limits.test_models_at_once, "palestra-test") as pool:
            attempts = [_Attempt(self, m, i, relay, folder, steps) for i, m in enumerate(models)]
            rows = list(pool.map(lambda attempt: attempt.run(), attempts))
        return {
            "environment": self.draft.found.name,
            "environment_file": self.draft.found.file_path,
            "test_config": {"num_steps": self.num_steps, "group_size": self.group_size},
            "models_tested": [row["model"] for row in rows],
            "num_steps": self.num_steps,
            "group_size": self.group_size,
            "results": rows,
            "summary": {
                **_summary(rows, time.perf_counter() - began),
                "steps_requested": self.num_steps,
                "output_directory": folder,
            },
            "folder": folder,
        }

    def _require_bounds(self) -> None:
        limit = self.draft.site.limits.test_completions
        if self.num_steps < 1 or self.group_size < 2:
            raise SettingError(
                f"num_steps={self.num_steps}, group_size={self.group_size}; "
                "expected at least 1 problem and 2 attempts at each"
            )
        if self.num_steps * self.group_size > limit:
            raise NotAllowedError(
                f"num_steps × group_size = {short(self.num_steps * self.group_size)} attempts a model; "
                f"this site allows {limit}. Ask for fewer"
            )


@dataclass
class _Steps:
    """How many problems are done, of all models together."""

    each: int
    total: int
    progress: Callable[[float, float, str], None]
    done: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, label: str, done: int, usage: Usage) -> None:
        with self.lock:
            if self.done.get(label, -1) != done:
                self.done[label] = done
                requests = f", {usage.requests} requests" if usage.requests else ""
                self.progress(sum(self.done.values()), self.total, f"{label}: {done} of {self.each} problems{requests}")


@dataclass(frozen=True)
class _Attempt:
    """One model's test: its process, watched until it ends, times out or is cancelled."""

    test: InferenceTest
    model: Candidate
    index: int
    relay: Relay
    folder: Path
    steps: _Steps

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            state, error = self._process()
        except Exception as failure:  # this model's alone
            state, error = "failed", f"{type(failure).__name__}: {failure}"
        records = list(read_jsonl(self._file("jsonl")))
        usage = self.relay.usage[self.index]
        self.steps.at(self.model.label, len(records), usage)
        return {
            "model": self.model.label,
            "scale": self.model.scale,
            "endpoint": self.model.base_url or "local",
            "status": state,
            **({"error": error} if error else {}),
            **_scores(records),
            **self._tokens(records, usage),
            "seconds": round(time.perf_counter() - began, 1),
            "log_file": self._file("log"),
            "output_file": self._file("jsonl"),
        }

    def _file(self, suffix: str) -> Path:
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.model.label)[:80]
        return self.folder / f"{self.index}-{name}.{suffix}"

    def _process(self) -> tuple[str, str | None]:
        if self.test.cancelled.is_set():
            return "cancelled", None
        draft, settings, output = self.test.draft, self._file("settings.json"), self._file("jsonl")
        write_json(settings, self._settings())
        arguments = (draft.environment, "--config", settings, "--groups", self.test.num_steps, "--out", output)
        with open_private(self._file("log")) as log:
            environ = {**clean_environment(), _TOKEN_VARIABLE: self.relay.token, children.END_WITH_PARENT: "1"}
            command = children.isolated("-m", "palestra", "env", "process", *arguments)
            child = children.start(command, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            code = self._watch(child)
        finally:
            children.end(child)
        if self.test.cancelled.is_set():
            return "cancelled", None
        if code is None:
            minutes = self.test.draft.site.limits.test_minutes
            return "timed out", f"it took longer than {minutes:g} minutes; what was finished by then is counted"
        return ("completed", None) if code == 0 else ("failed", _last_line(self._file("log")) or f"exit code {code}")

    def _watch(self, child: subprocess.Popen[str]) -> int | None:
        until = time.monotonic() + self.test.draft.site.limits.test_minutes * 60
        while time.monotonic() < until and not self.test.cancelled.is_set():
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                done = sum(1 for _ in read_jsonl(self._file("jsonl")))
                self.steps.at(self.model.label, done, self.relay.usage[self.index])
        return None

    def _settings(self) -> dict[str, Any]:
        """The edited settings, for the process that makes the attempts. They hold no key."""
        draft, limits = self.test.draft, self.test.draft.site.limits
        run = {k: v for k, v in draft.settings().items() if k.partition(".")[0] in ("rollout", "seed", "model")}
        # whole groups are written one after the other: small batches leave more behind when time is up
        together = max(1, limits.test_requests_at_once // self.test.group_size)
        run |= {"rollout.group_size": self.test.group_size, "train.problems_per_step": together}
        same = {f.name: self.test.group_size for f in draft.fields.values() if f.also == "rollout.group_size"}
        settings = {**run, "env": {**draft.env_settings(), **same}}  # JSON is YAML, too
        if self.model.base_url is None:
            return {**settings, "model.name": self.model.name}
        openai = {
            "model_name": self.model.name,
            "base_url": self.relay.url(self.index),
            "api_key_env": _TOKEN_VARIABLE,
            "timeout_s": limits.test_minutes * 60,
            "max_concurrent": limits.test_requests_at_once,
        }
        return {**settings, "openai": openai}

    def _tokens(self, records: Sequence[Mapping[str, Any]], usage: Usage) -> dict[str, Any]:
        if self.model.base_url is not None:
            return {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cost_usd": usage.cost_usd,
            }
        masks = [mask for record in records for row in record["masks"] for mask in row]
        made = sum(mask != NOT_TRAINED for mask in masks)
        return {"prompt_tokens": len(masks) - made, "completion_tokens": made, "cost_usd": 0.0}


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
        "completions": len(passed),
        "total_completions": len(passed),  # the same, as other tools call it
        "correct": sum(passed),
        "correct_completions": sum(passed),
        "accuracy": sum(passed) / len(passed) if passed else None,
        "step_success_rate": sum(solved) / len(solved) if solved else None,
        "mean_score": sum(scores) / len(scores) if scores else None,
    }


def _summary(rows: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    tested = [row for row in rows if row["completions"]]
    best = max(tested, key=lambda row: (row["accuracy"], row["mean_score"]), default=None)
    accuracies = [row["accuracy"] for row in tested]
    costs = [row["cost_usd"] for row in rows if row["cost_usd"] is not None]
    return {
        "best_model": best["model"] if best else None,
        "best_accuracy": best["accuracy"] if best else None,
        "models_tested": len(tested),
        "models_succeeded": sum(row["status"] == "completed" for row in rows),
        "avg_accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "environment_working": bool(tested),
        "completions": sum(row["completions"] for row in rows),
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
        "completion_tokens": sum(row["completion_tokens"] for row in rows),
        "cost_usd": sum(costs) if costs else None,
        "seconds": round(seconds, 1),
    }


def _last_line(path: Path) -> str:
    """The error that ended a process, as it printed it."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("Error: ")] or lines
    return short(errors[-1].removeprefix("Error: "), 500) if errors else ""
