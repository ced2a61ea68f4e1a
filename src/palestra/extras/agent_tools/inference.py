"""rl_test_inference: the attempts of several models side by side, each in a process without our secrets.

A model is at an endpoint, at a local server, or loaded here. A relay runs between an environment's process and the
endpoint: it holds the key, and counts tokens and their cost.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from palestra.core import children
from palestra.core.errors import InputError, NotAllowedError, SettingError, UnsupportedError
from palestra.core.files import new_folder, open_private, read_jsonl, write_json
from palestra.core.group_codec import NOT_TRAINED
from palestra.core.http import HttpError, Request
from palestra.core.secrets import clean_environment
from palestra.extras.agent_tools.answers import short
from palestra.extras.agent_tools.locks import Site, is_hub_name
from palestra.extras.agent_tools.pending_run import PendingRunConfig

OPENROUTER = "https://openrouter.ai/api/v1"
OPENROUTER_MODELS = ("qwen/qwen3-8b", "z-ai/glm-4.7-flash", "minimax/minimax-m2.7")
_SCALES = dict(zip(OPENROUTER_MODELS, ("small", "medium", "large"), strict=True))
_MAX_NAME_CHARS = 300
_MAX_BODY_BYTES = 50_000_000
_MAX_REPLY_BYTES = 50_000_000


@dataclass(frozen=True)
class Candidate:
    """A model to test. Without a URL it is loaded here."""

    label: str  # as it was asked for
    name: str
    base_url: str | None = None
    api_key_env: str | None = None

    @property
    def scale(self) -> str | None:
        """small, medium or large, of the models that are tested by default."""
        return _SCALES.get(self.name)

    @property
    def more(self) -> dict[str, Any]:
        """Additional fields of every request: OpenRouter reports the cost on request."""
        return {"usage": {"include": True}} if self.base_url == OPENROUTER else {}


def choose_models(
    models: Sequence[str] | None, site: Site, current: str, environ: Mapping[str, str] = os.environ
) -> list[Candidate]:
    """The models that were named, or those that this site or its keys suggest, or the one to be trained."""
    url, key, usual = _endpoint(site, environ)
    names = list(models) if models else usual or [f"local:{current}"]
    if len(names) > site.limits.test_models:
        raise NotAllowedError(f"{len(names)} models were named; at most {site.limits.test_models} are tested together")
    if len(set(names)) != len(names):
        raise SettingError("a model is named twice; name each once")
    candidates = [_candidate(name, url, key) for name in names]
    paths = [c.label for c in candidates if models and c.base_url is None and not is_hub_name(c.name)]
    if paths and "model.name" not in site.unlock:
        raise NotAllowedError(
            f"{short(paths[0])}: only models of the hub can be named here, such as local:Qwen/Qwen3-0.6B; "
            "the site file allows paths with unlock: [model.name]"
        )
    return candidates


def _endpoint(site: Site, environ: Mapping[str, str]) -> tuple[str | None, str | None, list[str]]:
    """Its URL, the name of its key's variable, and the models to take when none are named."""
    inference = site.inference
    if inference.base_url:
        return inference.base_url, inference.api_key_env, inference.models
    if environ.get("OPENROUTER_API_KEY"):
        return OPENROUTER, "OPENROUTER_API_KEY", inference.models or list(OPENROUTER_MODELS)
    if environ.get("OPENAI_BASE_URL"):
        return environ["OPENAI_BASE_URL"], "OPENAI_API_KEY", inference.models
    return None, None, inference.models


def _candidate(label: str, url: str | None, key: str | None) -> Candidate:
    name, at, place = label.rpartition("@http")
    if not label.strip() or len(label) > _MAX_NAME_CHARS or not label.isprintable():
        raise InputError(f"{short(label)!r} is not the name of a model")
    if at:
        if urlsplit(f"http{place}").hostname not in ("127.0.0.1", "localhost", "::1"):
            raise NotAllowedError(
                f"{short(label)}: only a server on this machine can be named here; for another one, set "
                "inference.base_url in the site file, or OPENAI_BASE_URL"
            )
        return Candidate(label, name, f"http{place}")  # without a key
    if label.startswith("local:"):
        return Candidate(label, label.removeprefix("local:"))
    if label.startswith("palestra/") or (label.startswith(("/", "./", "~")) and Path(label).expanduser().exists()):
        return Candidate(label, label)
    if url is None:
        raise SettingError(
            f"nothing says where {short(label)} is: set OPENROUTER_API_KEY, or OPENAI_BASE_URL and OPENAI_API_KEY, "
            f"for an endpoint; write local:{short(label)} to load it here, or {short(label)}@http://127.0.0.1:8000/v1 "
            "for a server on this machine"
        )
    return Candidate(label, label, url, key)


class Relay(ThreadingHTTPServer):
    """A server on a loopback port for one model at an endpoint, with a token of its own. It counts what is used."""

    daemon_threads = True

    def __init__(self, model: Candidate, timeout_s: float, max_completions: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.token = secrets.token_urlsafe(24)
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.cost_usd: float | None = None  # until an answer names a cost
        self._model, self._timeout_s, self._completions_left = model, timeout_s, max_completions
        self._max_completions = max_completions
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        threading.Thread(target=self.serve_forever, name="palestra-relay", daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()

    def ask(self, body: bytes) -> tuple[int, bytes]:
        """Forward a request, which may only ask for the tested model, and count its usage."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return 403, _error("the body is not a JSON object")
        if request.get("model") != self._model.name:
            return 403, _error(f"this is a test of {self._model.name}; another model is not asked")
        count = request.get("n") or 1
        if not isinstance(count, int) or count < 1 or not self._reserve(count):
            return 403, _error(f"n={short(count)}: this test may ask for {self._max_completions} completions in all")
        status, reply = self._post(request)
        self._count(reply if status == 200 else b"")
        return status, reply

    def _reserve(self, completions: int) -> bool:
        """Reserve completions; return False without counting if that would exceed the limit."""
        with self._lock:
            is_enough = completions <= self._completions_left
            self._completions_left -= completions if is_enough else 0
            return is_enough

    def _count(self, reply: bytes) -> None:
        """Count an answered request, with the usage that the answer reports."""
        try:
            usage = dict(json.loads(reply)["usage"])
        except (ValueError, KeyError, TypeError):
            usage = {}
        cost = usage.get("cost")
        with self._lock:
            self.requests += 1
            for name in ("prompt_tokens", "completion_tokens"):
                if type(count := usage.get(name)) is int and count > 0:
                    setattr(self, name, getattr(self, name) + count)
            if isinstance(cost, int | float) and not isinstance(cost, bool):
                self.cost_usd = (self.cost_usd or 0.0) + cost

    def _post(self, request: dict[str, Any]) -> tuple[int, bytes]:
        model = self._model
        key = os.environ.get(model.api_key_env) if model.api_key_env else None  # read for each request
        url = f"{(model.base_url or '').rstrip('/')}/chat/completions"
        body = {**request, **model.more}
        try:
            reply = Request(url, body, token=key, timeout_s=self._timeout_s, max_bytes=_MAX_REPLY_BYTES).send()
        except HttpError as error:
            return 502, _error(str(error))
        return reply.status, reply.body


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        relay = cast(Relay, self.server)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        length = self.headers.get("Content-Length", "")
        if not hmac.compare_digest(token.encode(), relay.token.encode()):
            self._answer(401, _error("the token is wrong"))
        elif not (length.isdecimal() and int(length) <= _MAX_BODY_BYTES):
            self._answer(413, _error("the body is too large"))
        elif self.path != "/v1/chat/completions":
            self._answer(404, _error("there is nothing at this path"))
        else:
            self._answer(*relay.ask(self.rfile.read(int(length))))

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the environment was stopped while it waited
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


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
