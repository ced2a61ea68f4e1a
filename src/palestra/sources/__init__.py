"""Groups of rollouts that are produced outside of the training loop's own agent loop.

`programs/` runs agents that are programs against the gateway and collects their attempts.
"""
