"""The official openai client against a gateway over the embedded model."""

import asyncio

import openai
import pytest

from palestra.core.types import Problem, SamplingParams
from palestra.gateway.gateway import Gateway
from palestra.serve.loading import load_completer

QUESTION = {"role": "user", "content": "What is 2 + 3?"}


@pytest.fixture(scope="module")
def model():
    return load_completer("palestra/tiny")


def with_gateway(model, agent, **options):
    """What `agent(gateway)` returns; a gateway runs meanwhile."""

    async def run():
        gateway = Gateway(model, SamplingParams(max_new_tokens=200), **options)
        await gateway.start()
        try:
            return await agent(gateway)
        finally:
            await gateway.close()

    return asyncio.run(run())


def client_of(attempt, **options):
    given = {"base_url": attempt.base_url, "api_key": attempt.api_key, "max_retries": 0}
    return openai.AsyncOpenAI(**{**given, **options})


def test_an_attempt_is_found_by_its_url_or_its_key_and_no_key_opens_another(model):
    async def agent(gateway):
        one, other = (gateway.open(Problem(f"p{i}", ""), seed_key=f"0/0/{i}") for i in range(2))

        async def ask(base_url, api_key):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                return await client.chat.completions.create(model="any", messages=[QUESTION], max_tokens=3)

        await ask(one.base_url, one.api_key)
        await ask(f"{gateway.url}/v1", one.api_key)
        await ask(one.base_url, "sk-of-my-own")
        assert one.counts.requests == 3
        assert other.counts.requests == 0
        for base_url, key in [(one.base_url, other.api_key), (f"{gateway.url}/v1", "sk-of-my-own")]:
            with pytest.raises(openai.AuthenticationError):
                await ask(base_url, key)
        assert len(await one.finish()) == 3
        for base_url in (one.base_url, f"{gateway.url}/v1"):
            with pytest.raises(openai.AuthenticationError, match="has ended"):
                await ask(base_url, one.api_key)
        await ask(other.base_url, other.api_key)

    with_gateway(model, agent)
