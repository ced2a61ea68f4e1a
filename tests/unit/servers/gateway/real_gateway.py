"""A gateway or `palestra serve` on loopback, for the tests of this folder that talk to one by HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from served import served

from palestra.core.types import Problem, SamplingParams
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.inference import inference_app


def with_gateway(
    model: Completer, agent: Callable[[Gateway], Awaitable[Any]], workers: Any = None, **options: Any
) -> Any:
    """What `agent(gateway)` returns; a gateway runs meanwhile, in the same event loop or with these `workers`."""

    async def run() -> Any:
        gateway = Gateway(model, options.pop("sampling", SamplingParams(max_new_tokens=200)), **options)
        if workers is not None:
            gateway.workers = workers
        await gateway.start()
        try:
            return await agent(gateway)
        finally:
            await gateway.close()

    return asyncio.run(run())


def with_attempt(model: Completer, agent: Callable[[Attempt], Awaitable[Any]], **options: Any) -> Any:
    return with_gateway(model, lambda gateway: agent(open_attempt(gateway)), **options)


def open_attempt(gateway: Gateway, sibling: int = 0) -> Attempt:
    return gateway.open(Problem("p", ""), seed_key=f"0/0/{sibling}")


@dataclass(frozen=True)
class Address:
    """The address of `palestra serve`, with the names that attempts have."""

    anthropic_base_url: str
    api_key: str = "none"

    @property
    def base_url(self) -> str:
        return f"{self.anthropic_base_url}/v1"


def with_serve(model: Completer, agent: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `agent(address)` returns; the application of `palestra serve` runs meanwhile, in a thread."""
    with served(inference_app(model)) as url:
        return asyncio.run(agent(Address(url)))
