"""Write demonstrations for planner.py with a program, and train on them:

python examples/planner_demonstrations.py demonstrations.jsonl
palestra train examples/planner.py --model.name Qwen/Qwen2.5-1.5B-Instruct --stages sft:demonstrations.jsonl,rft,grpo
"""

import json
import re
import sys
from pathlib import Path

from planner import agent, calculate, reserved, stock, suite

COUNT = 20


def solve(question: str) -> list[tuple]:
    """The calls that answer a question, each a tool and its arguments."""
    if found := re.match(r"How many (\w+)s do (\w+) and (\w+) hold", question):
        item, first, second = found.groups()
        a, b = stock(item, first), stock(item, second)
        return [
            (stock, {"item": item, "warehouse": first}),
            (stock, {"item": item, "warehouse": second}),
            (reserved, {"item": item}),
            (calculate, {"a": a, "operator": "+", "b": b}),
            (calculate, {"a": a + b, "operator": "-", "b": reserved(item)}),
        ]
    if found := re.match(r"By how many (\w+)s does (\w+) differ from (\w+)\?", question):
        item, first, second = found.groups()
        return [
            (stock, {"item": item, "warehouse": first}),
            (stock, {"item": item, "warehouse": second}),
            (calculate, {"a": stock(item, first), "operator": "-", "b": stock(item, second)}),
        ]
    found = re.match(r"If (\w+) gets (\d+) times as many (\w+)s", question)
    place, times, item = found.groups()
    return [
        (stock, {"item": item, "warehouse": place}),
        (calculate, {"a": stock(item, place), "operator": "*", "b": int(times)}),
    ]


def conversation(question: str) -> dict:
    """A solved case in OpenAI's format."""
    messages = [{"role": "system", "content": agent.instructions}, {"role": "user", "content": question}]
    result = None
    for number, (tool, arguments) in enumerate(solve(question)):
        call = {"name": tool.name, "arguments": json.dumps(arguments)}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}]}
        )
        result = tool(**arguments)
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": str(result)})
    messages.append({"role": "assistant", "content": f"The number is {result}."})
    return {"messages": messages}


training_cases, _ = suite.split()  # the others are held out
lines = [json.dumps(conversation(case.input)) for case in list(training_cases)[:COUNT]]
Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
print(f"{len(lines)} demonstrations in {sys.argv[1]}")
