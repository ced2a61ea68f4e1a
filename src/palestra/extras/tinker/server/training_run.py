"""A client's training as a run like any other: a folder, a row in the index, metrics and rollouts for each step."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array, Group, Message, Rollout, Turn
from palestra.extras.tinker.server.base_model import AdapterSpec, BaseModel
from palestra.extras.tinker.server.messages import Datum
from palestra.extras.tinker.server.requests import Adam
from palestra.extras.tinker.server.training_model import Outputs
from palestra.runs.index import listed
from palestra.runs.tracking import open_trackers

log = logging.getLogger("palestra")

RECORDED_ROWS = 1024  # of one step that are written to rollouts.jsonl


class TrainingRun:
    """The records of one model. A step begins with the first gradient after the last one.

    They are written in a thread of their own: no client waits for them. What cannot be written is logged.
    """

    def __init__(
        self, output_dir: Path, base: BaseModel, spec: AdapterSpec, name: str, about: Mapping[str, Any]
    ) -> None:
        settings = {"model": {"name": base.name}, "lora": {"r": spec.rank, "alpha": spec.alpha}}
        config = RunConfig(output_dir=str(output_dir)).with_settings(settings)
        tinker = {**about, "base_model": base.name, "spec": asdict(spec)}
        self.folder = RunFolder.create(output_dir, name, config, {"tinker": tinker})
        self._tokenizer = base.tokenizer
        self._listing = contextlib.ExitStack()
        self._listing.enter_context(listed(self.folder.path))
        self._tracker = open_trackers(config, self.folder, self.folder.record, resume_after=None)
        self._began = time.perf_counter()
        self._step = 0
        self._writer = ThreadPoolExecutor(1, "tinker-records")
        self._begin_step()

    def computed(self, data: Sequence[Datum], loss_fn: str, outputs: Outputs, seconds: float) -> None:
        """Gradients of these rows were added."""
        self._writer.submit(self._logged, self._add_rows, data, loss_fn, outputs, seconds)

    def stepped(self, adam: Adam, grad_norm: float, seconds: float) -> None:
        """The weights have changed."""
        elapsed = time.perf_counter() - self._began
        self._writer.submit(self._logged, self._write_step, adam, grad_norm, seconds, elapsed)

    def close(self, *, completed: bool) -> None:
        """The run has ended; as stopped where its client did not end the session."""
        self._writer.shutdown()
        self._tracker.close()
        stopped = None if completed else KeyboardInterrupt()
        with contextlib.suppress(KeyboardInterrupt):
            self._listing.__exit__(None if stopped is None else type(stopped), stopped, None)

    def _logged(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:
            log.exception("records of %s could not be written", self.folder.path)

    def _add_rows(self, data: Sequence[Datum], loss_fn: str, outputs: Outputs, seconds: float) -> None:
        self._loss += outputs.loss
        self._rows += len(data)
        self._tokens += sum(len(datum.token_ids) for datum in data)
        self._seconds += seconds
        for datum, logprobs in zip(data, outputs.logprobs, strict=True):
            if len(self._rollouts) < RECORDED_ROWS and logprobs.ndim == 1:
                self._rollouts.append(_rollout(datum, loss_fn, logprobs, self._tokenizer, self._step))

    def _write_step(self, adam: Adam, grad_norm: float, seconds: float, elapsed: float) -> None:
        self._step += 1
        row = {
            "loss": self._loss, "grad_norm": grad_norm, "learning_rate": adam.learning_rate,
            "rows": float(self._rows), "tokens": float(self._tokens),
            "train_seconds": self._seconds + seconds, "elapsed_seconds": elapsed,
        }  # fmt: skip
        advantages = [float(r.reward) for r in self._rollouts if r.advantages is not None]
        if advantages:
            row["advantage_mean"] = float(np.mean(advantages))
        self._tracker.metrics(self._step, row)
        groups: dict[str, list[Rollout]] = {}  # rows of one prompt may come apart from each other
        for rollout in self._rollouts:
            groups.setdefault(rollout.problem_id, []).append(rollout)
        self._tracker.rollouts(self._step, [Group(name, tuple(rollouts)) for name, rollouts in groups.items()])
        self._begin_step()

    def _begin_step(self) -> None:
        self._loss = self._seconds = 0.0
        self._rows = self._tokens = 0
        self._rollouts: list[Rollout] = []


def _rollout(datum: Datum, loss_fn: str, computed: Array, tokenizer: Any, version: int) -> Rollout:
    """A row as a rollout: trained targets are the model's turns. Rewards do not travel; advantages stand for them."""
    inputs = datum.inputs
    targets = inputs["target_tokens"].values
    sampled = loss_fn != "cross_entropy"
    amount = inputs["advantages" if sampled else "weights"].values
    trained = (amount != 0) | (inputs["logprobs"].values != 0) if sampled else amount != 0
    behaviour = inputs["logprobs"].values if sampled else computed
    tokens = np.concatenate([datum.token_ids[:1], targets])
    mask = np.concatenate([[False], trained])
    values = np.concatenate([[0.0], behaviour])
    turns: list[Turn] = []
    messages: list[Message] = []
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    for start, ids, logprobs in zip([0, *changes], np.split(tokens, changes), np.split(values, changes), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if mask[start]:
            turns.append(Turn("model", ids, logprobs, np.full(len(ids), version)))
            messages.append(Message("assistant", text))
        else:
            turns.append(Turn("environment" if turns else "template", ids))
            messages.append(Message("user", text))
    prompt = len(turns[0].token_ids) if turns[0].maker != "model" else 1
    return Rollout(
        problem_id=hashlib.blake2b(tokens[:prompt].tobytes(), digest_size=4).hexdigest(),
        turns=tuple(turns),
        messages=tuple(messages),
        stop="answered",
        reward=float(amount[trained].mean()) if sampled and trained.any() else 0.0,
        advantages=np.concatenate([[0.0], amount]).astype(np.float32) if sampled else None,
    )
