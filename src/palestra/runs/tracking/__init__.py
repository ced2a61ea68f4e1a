"""Trackers of metrics: metrics.jsonl always; W&B, TensorBoard, MLflow and Trackio if asked for."""
