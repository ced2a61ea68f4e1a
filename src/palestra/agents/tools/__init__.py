"""Tools: a typed Python function with a docstring, or the tools of an MCP server.

`schema` and `docstring` describe a tool to the model, `arguments` checks a call, `run` executes it with a timeout.
"""
