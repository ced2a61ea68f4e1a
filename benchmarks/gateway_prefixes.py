"""Prompt tokens that the engine computes for agents whose requests share a beginning, with branches and without.

    python benchmarks/gateway_prefixes.py [--model palestra/tiny] [--siblings 8]

Each agent is a group of siblings at one problem, with the demo's instructions and tools. Token counts do not depend on
the machine; about ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from palestra import demo
from palestra.core.types import Message, Problem, SamplingParams
from palestra.models.loading import load_model, load_tokenizer
from palestra.policy.local import LocalPolicy
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.request import ChatRequest
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.sampling_fields import SamplingFields

TOOLS = tuple(tool.schema for tool in demo.agent.tools)
SYSTEM = Message("system", demo.agent.instructions)
Ask = Callable[..., Awaitable[Message]]


class WithoutBranches:
    """The same policy, that cannot branch."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        if name == "branch":
            raise AttributeError(name)
        return getattr(self._policy, name)


def user(text: str) -> Message:
    return Message("user", text)


async def linear(ask: Ask) -> None:
    """Three turns, one after the other."""
    history = [SYSTEM, user("What do 3 lamps cost?")]
    for _ in range(3):
        history += [await ask(*history), user("And 4 vases?")]


async def subagents(ask: Ask) -> None:
    """Three subagents with the same instructions, then the answer."""
    first = [SYSTEM, user("What do 3 lamps and 4 vases cost?")]
    plan = await ask(*first)
    found = [await ask(SYSTEM, user(f"What does one {item} cost?")) for item in ("lamp", "vase", "chair")]
    await ask(*first, plan, user(" ".join(message.text for message in found)))


async def edits(ask: Ask) -> None:
    """The last question is asked three times, in other words each time."""
    history = [SYSTEM, user("What do 3 lamps cost?")]
    history += [await ask(*history), user("And 4 vases?")]
    history.append(await ask(*history))
    for words in ("And 5 chairs?", "And 6 chairs, please?", "How about 7 chairs?"):
        await ask(*history, user(words))


async def parallel(ask: Ask) -> None:
    """Four requests at once behind the same answer."""
    history = [SYSTEM, user("What do 3 lamps cost?")]
    history.append(await ask(*history))
    await asyncio.gather(*(ask(*history, user(f"And {n} vases?")) for n in range(4)))


AGENTS = (linear, subagents, edits, parallel)


async def prefilled(model: Completer, engine: Any, agent: Callable[[Ask], Awaitable[None]], siblings: int) -> float:
    """Tokens an attempt that the engine computed other than to sample the next one."""
    computed, launch = 0, type(engine.runner).launch

    def counting(chunks: Any) -> Any:
        nonlocal computed
        computed += sum(chunk.count for chunk in chunks)
        return launch(engine.runner, chunks)

    engine.weights_changed(engine.version + 1)  # nothing of the last agent is known
    engine.runner.launch = counting
    gateway = Gateway(model, SamplingParams(max_new_tokens=2000))

    async def play(attempt: Attempt) -> None:
        async def ask(*messages: Message) -> Message:
            fields = SamplingFields.model_validate({"max_tokens": 24})
            (answer,) = await attempt.answer(ChatRequest(messages, fields, TOOLS))
            return answer.message

        await agent(ask)

    with gateway.shared_prompts(siblings) as prompts:
        attempts = [
            gateway.open(Problem("p", ""), seed_key=str(i), shared_prompts=prompts, sampling=None)
            for i in range(siblings)
        ]
        await asyncio.gather(*map(play, attempts))
        sampled = sum(attempt.counts.sampled_tokens for attempt in attempts)
        for attempt in attempts:
            await attempt.finish()
    await gateway.close()
    return (computed - sampled) / siblings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="palestra/tiny")
    parser.add_argument("--siblings", type=int, default=8)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    policy = LocalPolicy(load_model(options.model).model, tokenizer)
    context = policy.engine.context
    print("prompt tokens computed, an attempt\n\n| agent | without | with branches | |\n| --- | --- | --- | --- |")
    for agent in AGENTS:
        counts = []
        for each in (WithoutBranches(policy), policy):
            model = Completer(each, tokenizer, options.model, context)  # type: ignore[arg-type]
            counts.append(asyncio.run(prefilled(model, policy.engine, agent, options.siblings)))
        without, shared = counts
        print(f"| {agent.__name__} | {without:.0f} | {shared:.0f} | {100 * shared / without:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
