"""One whole training in one folder: evaluate, train, evaluate, save."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message
from palestra.envs.base import Environment
from palestra.evals.report import EvalReport
from palestra.export.hf import save_hf
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.models.loading import LoadedModel
from palestra.rollout.collect import Collector, RewardFunction
from palestra.tracking.jsonl import write_eval_rollouts
from palestra.tracking.open import open_trackers
from palestra.train.checkpoint import TrainState, last_checkpoint, read_checkpoint
from palestra.train.loop import Training, Watcher, run_evaluation, total_steps
from palestra.train.setup import build_collectors, build_policy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training leaves behind."""

    model: Any
    tokenizer: Any
    model_path: Path
    before: EvalReport
    after: EvalReport
    metrics: list[dict[str, float]]
    seconds: float


def train_in_folder(
    loaded: LoadedModel,
    environment: Environment,
    config: RunConfig,
    folder: Path,
    runner: asyncio.Runner,
    watcher: Watcher,
    reward_functions: Sequence[RewardFunction] = (),
    *,
    rollouts_by: Callable[[Collector], Collector] = lambda collector: collector,
    resumed: bool = False,
) -> Outcome:
    """Score the model, train it, score it again and save it; with `resumed`, go on from the last checkpoint.

    `rollouts_by` may put another collector in the place of the built-in one.
    """
    began = time.perf_counter()
    checkpoints = folder / "checkpoints"
    start, state = (last_checkpoint(checkpoints), TrainState()) if resumed else (None, TrainState())
    if start is not None:
        state = read_checkpoint(start)
        watcher.note(f"going on from step {state.step}")
    chat = ChatFormat(loaded.tokenizer)
    _check_tools(environment, chat, config)
    steps = total_steps(config, len(environment.problems("train")))
    model = add_lora(loaded.model, config.lora) if config.lora.r else loaded.model
    learner = LocalLearner(model, config=config, pad_token_id=loaded.tokenizer.pad_token_id or 0, total_steps=steps)
    policy = build_policy(model, loaded.tokenizer, config.model.engine, config.model.kv_memory_gib)
    collector, scorer = map(rollouts_by, build_collectors(environment, policy, chat, config, reward_functions))
    record = json.loads((folder / "run.json").read_text())
    tracker = open_trackers(config, RunFolder(folder), record, resume_after=state.step if resumed else None)
    training = Training(config, collector, scorer, learner, tracker, checkpoints, runner, watcher, state)
    try:
        before = training.evaluate("scoring before")
        write_eval_rollouts(RunFolder(folder), "before", before.rollouts)
        if start is not None:
            learner.load(start)
            policy.refresh(state.policy_version)
        training.run()
        after = training.evaluate("scoring after")
        write_eval_rollouts(RunFolder(folder), "after", after.rollouts)
    finally:
        tracker.close()
    path = save_hf(model, loaded.tokenizer, folder / "model", record=record)
    metrics = RunFolder(folder).metrics()
    return Outcome(model, loaded.tokenizer, path, before, after, metrics, time.perf_counter() - began)


def evaluate_only(
    loaded: LoadedModel, environment: Environment, config: RunConfig, runner: asyncio.Runner, watcher: Watcher
) -> EvalReport:
    """Score the held-out problems once."""
    policy = build_policy(loaded.model, loaded.tokenizer, config.model.engine, config.model.kv_memory_gib)
    _, scorer = build_collectors(environment, policy, ChatFormat(loaded.tokenizer), config)
    return run_evaluation(scorer, environment.problems("held_out"), config, runner, watcher, "scoring")


def _check_tools(environment: Environment, chat: ChatFormat, config: RunConfig) -> None:
    """Find out now, not in every rollout, whether tools can be used as asked."""
    episode = environment.open(environment.problems("train")[0])
    tools = list(episode.tools)
    episode.close()
    if tools:
        if config.rollout.constrain_tool_calls:
            chat.call_grammars.of([tool.schema for tool in tools])
        chat.continuation([Message("tool", "result", tool_call_id="call_0", name=tools[0].name)])
    elif config.echo.coefficient > 0:
        raise PalestraError(
            "echo.coefficient > 0 learns from tool results, but this agent has no tools; give it some or use 0"
        )
