"""Agents to train: an `Agent` (model, instructions, tools), or a program that calls the model over HTTP.

`tools/` turns typed Python functions and MCP servers into tools.
Agents of the OpenAI Agents SDK are accepted as they are.
"""
