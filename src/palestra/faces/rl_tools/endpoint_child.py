"""What asks an endpoint, in a process of its own: the attempts of `palestra env process`, without torch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams
from palestra.envs.load import load_env
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.collect import Collector, endpoint_speakers
from palestra.rollout.process import process


async def attempt(asked: Mapping[str, Any], path: Path) -> None:
    """Attempt the first training problems and write one scored group a line, each as soon as it is there."""
    env = load_env(asked["environment"], asked["env"])
    config = RunConfig.build(env.env.run_settings, asked["run"])
    rollout = config.rollout
    rollout.require_free_calls("the endpoint samples, and it takes no grammar")
    sampling = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p)
    limits = AttemptLimits(sampling, rollout.max_tool_rounds, rollout.tool_timeout_s)
    records = process(
        Collector(env, limits, endpoint_speakers(OpenAIChat(OpenAISettings.read(asked["openai"])))),
        env.problems("train")[: asked["groups"]],
        group_size=rollout.group_size,
        seed=config.seed,
        at_once=config.train.problems_per_step,
    )
    with path.open("w", encoding="utf-8") as file:
        async for record in records:
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            file.flush()


def main() -> None:
    """`… SETTINGS_FILE OUTPUT_FILE`"""
    settings, path = sys.argv[1:]
    try:
        asyncio.run(attempt(json.loads(Path(settings).read_text(encoding="utf-8")), Path(path)))
    except PalestraError as error:
        sys.exit(f"Error: {error}")
