"""Palestra: make tool-using language-model agents better by reinforcement learning."""
