"""One training over the wire in one folder: serve the model, take batches, learn, save."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.export.hf import save_hf
from palestra.learner.lora import add_lora
from palestra.models.loading import LoadedModel
from palestra.policy.local import LocalPolicy
from palestra.serve.completer import Ask, Completer
from palestra.serve.inference import inference_app
from palestra.serve.web import Server, open_port, url_of
from palestra.tracking.open import open_trackers
from palestra.train.checkpoint import TrainState, last_checkpoint, read_checkpoint
from palestra.train.loop import Watcher
from palestra.train.serving import completer_of, context_of
from palestra.train.setup import build_collectors, build_policy
from palestra.wire.client import Elsewhere, WireClient, WireLearner, WireTraining
from palestra.wire.groups import Limits


@dataclass(frozen=True, slots=True)
class Address:
    """Where the model is served to the environments."""

    host: str = "127.0.0.1"
    port: int = 9001
    token: str | None = None


@dataclass(frozen=True, slots=True)
class WireOutcome:
    """What a training over the wire leaves behind."""

    model_path: Path
    metrics: list[dict[str, float]]
    seconds: float


def train_over_wire(
    loaded: LoadedModel,
    config: RunConfig,
    folder: Path,
    wire: WireClient,
    address: Address,
    runner: asyncio.Runner,
    watcher: Watcher,
    *,
    resumed: bool = False,
    served: Callable[[str, Any], None] = lambda url, tokenizer: None,
    check: Callable[[], None] = lambda: None,
) -> WireOutcome:
    """Serve the model, train it on what environments post, save it.

    `served` is told the inference URL and the tokenizer; `check` may raise while groups are waited for.
    """
    began = time.perf_counter()
    if config.train.max_steps is None:
        raise PalestraError("environments over the wire have no last problem; set train.max_steps")
    config.rollout.require_free_calls("environments over the wire sample with settings of their own")
    model = add_lora(loaded.model, config.lora) if config.lora.r else loaded.model
    learner = WireLearner(model, config=config, pad_token_id=loaded.tokenizer.pad_token_id or 0)
    policy = build_policy(model, loaded.tokenizer, config.model.engine, config.model.kv_memory_gib)
    if not isinstance(policy, LocalPolicy):
        raise PalestraError("serving a model while it is trained needs the paged engine; this model or engine is plain")
    state = _restore(learner, policy, folder / "checkpoints", watcher) if resumed else TrainState()
    record = json.loads((folder / "run.json").read_text())
    tracker = open_trackers(config, RunFolder(folder), record, resume_after=state.step if resumed else None)
    collector, scorer = build_collectors(Elsewhere(), policy, ChatFormat(loaded.tokenizer), config)
    limits = Limits(policy.engine.vocabulary, context_of(loaded))
    training = WireTraining(
        config, collector, scorer, learner, tracker, folder / "checkpoints", runner, watcher, state,
        wire=wire, limits=limits, check=check,
    )  # fmt: skip
    completer = completer_of(loaded, policy)
    completer.on_ask = _TemperatureNote(config.rollout.temperature, watcher)
    try:
        with _serving(completer, address, runner) as url:
            served(url, loaded.tokenizer)
            runner.run(wire.register(config, state.step, limits.context_tokens, folder))
            training.run()
    finally:
        tracker.close()
    path = save_hf(model, loaded.tokenizer, folder / "model", record=record)
    return WireOutcome(path, RunFolder(folder).metrics(), time.perf_counter() - began)


def _restore(learner: WireLearner, policy: LocalPolicy, checkpoints: Path, watcher: Watcher) -> TrainState:
    start = last_checkpoint(checkpoints)
    if start is None:
        return TrainState()
    state = read_checkpoint(start)
    learner.load(start)
    policy.refresh(state.policy_version)
    watcher.note(f"going on from step {state.step}")
    return state


@contextmanager
def _serving(completer: Completer, address: Address, runner: asyncio.Runner) -> Iterator[str]:
    """The inference server as a task of the runner's loop: it goes on whenever the runner runs something."""
    sock = open_port(address.host, address.port, address.token)
    server = Server(inference_app(completer, token=address.token))
    task = runner.get_loop().create_task(server.serve(sockets=[sock]))
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        runner.run(asyncio.wait_for(task, 20))


class _TemperatureNote:
    """Tells once of requests at another temperature than the learner's: their logprobs would not agree."""

    def __init__(self, temperature: float, watcher: Watcher) -> None:
        self._temperature = temperature
        self._watcher = watcher
        self._told = False

    def __call__(self, ask: Ask) -> None:
        asked = ask.params.temperature
        if asked != self._temperature and not self._told:
            self._told = True
            self._watcher.note(
                f"an environment samples at temperature {asked:g}, the learner scores at {self._temperature:g}; "
                f"if it is for training, set --rollout.temperature {asked:g}"
            )
