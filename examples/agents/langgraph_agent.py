"""The same agent as a LangGraph graph, by LangChain's `create_agent`."""

import json
import sys

import shop
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

tools = [tool(function, parse_docstring=True) for function in shop.FUNCTIONS.values()]
agent = create_agent(ChatOpenAI(model="gpt-4.1-mini"), tools, system_prompt=shop.INSTRUCTIONS)
question = {"messages": [("user", json.load(sys.stdin)["input"])]}
print(agent.invoke(question, {"recursion_limit": 2 * shop.MAX_ROUNDS})["messages"][-1].content)
