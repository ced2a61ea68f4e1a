"""A plain loop with the `openai` package and the Responses API; each turn goes on from the one before by its id."""

import json
import sys

import shop
from openai import OpenAI

TOOLS = [
    {"type": "function", "name": name, "description": text, "parameters": schema, "strict": False}
    for name, (text, schema) in shop.SCHEMAS.items()
]
client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
news, previous = [{"role": "user", "content": json.load(sys.stdin)["input"]}], None
for _ in range(shop.MAX_ROUNDS):
    response = client.responses.create(
        model="gpt-4.1-mini",
        instructions=shop.INSTRUCTIONS,
        input=news,
        tools=TOOLS,
        previous_response_id=previous,
    )
    previous = response.id
    calls = [item for item in response.output if item.type == "function_call"]
    news = [
        {"type": "function_call_output", "call_id": call.call_id, "output": shop.call(call.name, call.arguments)}
        for call in calls
    ]
    if not calls:
        break
print(response.output_text)
