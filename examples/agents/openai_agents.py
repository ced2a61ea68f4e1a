"""The same agent with the openai-agents SDK, which speaks the Responses API."""

import json
import sys

import shop
from agents import Agent, Runner, function_tool

agent = Agent(
    name="shop assistant",
    model="gpt-4.1-mini",
    instructions=shop.INSTRUCTIONS,
    tools=[function_tool(function) for function in shop.FUNCTIONS.values()],
)
print(Runner.run_sync(agent, json.load(sys.stdin)["input"], max_turns=shop.MAX_ROUNDS).final_output)
