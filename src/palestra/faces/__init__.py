"""What people and agents use: the command line, the rl_* tools over MCP and HTTP, and the pages that they write."""
