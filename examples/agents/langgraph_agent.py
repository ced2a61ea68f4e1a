"""The same agent with LangGraph, over langchain-openai."""

import json
import sys

import shop
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

tools = [tool(function, parse_docstring=True) for function in shop.FUNCTIONS.values()]
agent = create_react_agent(ChatOpenAI(model="gpt-4.1-mini"), tools, prompt=shop.INSTRUCTIONS)
question = {"messages": [("user", json.load(sys.stdin)["input"])]}
print(agent.invoke(question, {"recursion_limit": 2 * shop.MAX_ROUNDS})["messages"][-1].content)
