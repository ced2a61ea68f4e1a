"""An agent of the openai-agents SDK, as it is: Palestra trains it, then the SDK runs it with the trained model.

palestra train examples/openai_agents_sdk.py
palestra serve RUN                                # the run's name or folder, as the training printed it
python examples/openai_agents_sdk.py http://127.0.0.1:8000/v1 "How many green mugs and red lamps are in stock?"
"""

import sys

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from palestra import EvalSuite, measure

COLOURS, THINGS = "red blue green black white pink".split(), "lamp mug chair pen book clock hat bag".split()
STOCK = {f"{colour} {thing}": 11 + 7 * i + 9 * k for i, colour in enumerate(COLOURS) for k, thing in enumerate(THINGS)}


@function_tool
def stock(item: str) -> int:
    """Look up the stock of an item."""
    return STOCK[item.removesuffix("s")]


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(name="stock-clerk", model="palestra/tiny", instructions="Use the tools to answer.", tools=[stock, add])


@measure
def right_count(ctx):
    return f" {ctx.expect}." in ctx.final_assistant_message.text


pairs = [(a, b) for a in STOCK for b in STOCK if a < b][::8]
cases = [{"input": f"How many {a}s and {b}s are in stock?", "expect": STOCK[a] + STOCK[b]} for a, b in pairs]
suite = EvalSuite.from_records(cases, measures=[right_count])
config = {"train.max_steps": 15, "train.problems_per_step": 4, "rollout.group_size": 8, "rollout.max_new_tokens": 80}


def ask(url: str, question: str) -> str:
    """The agent's answer with the model that is served at `url`: the SDK's own loop, nothing of Palestra's."""
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=url, api_key="none"), use_responses=False)
    settings = RunConfig(model_provider=provider, model_settings=ModelSettings(temperature=0), tracing_disabled=True)
    return str(Runner.run_sync(agent, question, run_config=settings).final_output)


if __name__ == "__main__":
    print(ask(*sys.argv[1:]))
