"""Rollouts: one attempt of an agent at a problem, groups of attempts, and their rewards.

`agent_loop` is the one loop of turns and tool calls; training, evaluation and chat all use it.
`collect` runs groups concurrently.
"""
