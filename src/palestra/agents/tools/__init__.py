"""Tools: a typed Python function with a docstring, or the tools of an MCP server.

`schema` describes a tool to the model, `run` checks a call and executes it with a timeout.
"""
