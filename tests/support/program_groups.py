"""Groups of a program's attempts, made at a gateway of their own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from palestra.agents.programs import ProgramAgent, ProgramLimits
from palestra.core.config import RunConfig
from palestra.core.types import Group
from palestra.envs.suite_env import SuiteEnvironment
from palestra.rollout.collect import Collector
from palestra.rollout.rewards import RewardFunctions
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.completer import Completer
from palestra.sources.programs.runner import ProgramRunner
from palestra.train.limits import attempt_limits


def collect(
    model: Completer,
    environment: SuiteEnvironment,
    program: ProgramAgent,
    config: RunConfig,
    *,
    cases: int = 1,
    timeout_s: float = 60.0,
    during: Callable[[Gateway], Awaitable[Any]] | None = None,
    workers: Any = None,
    **options: Any,
) -> list[Group]:
    """The groups of the first cases; `during(gateway)` runs while they are collected. `options` are the collector's."""

    async def run() -> list[Group]:
        sampling = attempt_limits(config, training=True).sampling
        gateway = Gateway(model, sampling, routes=program.routes())
        if workers is not None:
            gateway.workers = workers
        of_collector = {"rewards": options.pop("rewards", RewardFunctions()), "max_open_episodes": 8}
        runner = ProgramRunner(
            environment, program, gateway, sampling, ProgramLimits(timeout_s), asyncio.Semaphore(8), **options
        )
        collector = Collector(environment, runner, **of_collector)
        problems, keys = environment.problems("train")[:cases], [f"0/{i}" for i in range(cases)]
        await gateway.start()
        try:
            async with asyncio.timeout(200):
                work = collector.collect(problems, config.rollout.group_size, keys)
                return (await asyncio.gather(work, *([during(gateway)] if during else [])))[0]
        finally:
            await gateway.close()

    return asyncio.run(run())
