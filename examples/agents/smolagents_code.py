"""The same agent with smolagents' CodeAgent, which calls tools by writing Python."""

import json
import os
import sys

import shop
from smolagents import CodeAgent, OpenAIServerModel, tool

model = OpenAIServerModel("gpt-4.1-mini", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = CodeAgent([tool(function) for function in shop.FUNCTIONS.values()], model, max_steps=shop.MAX_ROUNDS)
print(agent.run(json.load(sys.stdin)["input"]))
