"""The cost model: how long a step takes and how much memory it needs.

Computed from the model's shape, the device's bandwidth and FLOPS, and the work of a step.
Imports no torch, so `palestra plan` answers at once.
"""
