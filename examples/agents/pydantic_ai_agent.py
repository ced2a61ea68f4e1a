"""The same agent with pydantic-ai."""

import json
import sys

import shop
from pydantic_ai import Agent, UsageLimits

agent = Agent(
    "openai-chat:gpt-4.1-mini", system_prompt=shop.INSTRUCTIONS, tools=list(shop.FUNCTIONS.values()), retries=3
)
limits = UsageLimits(request_limit=shop.MAX_ROUNDS)
print(agent.run_sync(json.load(sys.stdin)["input"], usage_limits=limits).output)
