"""Agents that are programs, as something to train: they run against the gateway, and groups of rollouts come out."""
