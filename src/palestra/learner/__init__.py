"""Gradients: loss, backward pass and optimizer step of a local model, on one device or several ranks.

`base` defines the interface, `local` implements it for one process and `fsdp` for several.
Attention over prefix trees computes a group's shared prompt once.
"""
