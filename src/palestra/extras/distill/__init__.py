"""Distillation: also learn from a teacher's probabilities, along the model's own rollouts (`distill.*`)."""
