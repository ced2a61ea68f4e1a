"""A plain loop with the `openai` package and Chat Completions."""

import json
import sys

import shop
from openai import OpenAI

TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, (text, schema) in shop.SCHEMAS.items()
]
client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
messages = [
    {"role": "system", "content": shop.INSTRUCTIONS},
    {"role": "user", "content": json.load(sys.stdin)["input"]},
]
for _ in range(shop.MAX_ROUNDS):
    reply = client.chat.completions.create(model="gpt-4.1-mini", messages=messages, tools=TOOLS).choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    for call in reply.tool_calls or ():
        result = shop.call(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not reply.tool_calls:
        break
print(reply.content)
