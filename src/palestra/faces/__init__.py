"""User interfaces: the command line, the rl_* tools over MCP and HTTP, and HTML pages."""
