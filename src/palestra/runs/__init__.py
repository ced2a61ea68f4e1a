"""Managed runs: the index of all runs, and a supervisor that keeps each one alive in the background.

`manager` starts, stops and resumes runs; `reader` reads their folders.
`tracking/` sends metrics to JSONL, W&B, TensorBoard, MLflow and Trackio.
"""
