"""`StepTrainer`: GRPO step by step from Python, on any Hugging Face model, without agents and tools."""
