"""Agents that are programs: they run against the gateway, and groups of rollouts come out."""
