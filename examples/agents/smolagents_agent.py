"""The same agent with smolagents' ToolCallingAgent."""

import json
import os
import sys

import shop
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel("gpt-4.1-mini", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent([tool(function) for function in shop.FUNCTIONS.values()], model, max_steps=shop.MAX_ROUNDS)
print(agent.run(json.load(sys.stdin)["input"]))
