"""The rollout engine: paged KV, shared prompts, continuous batching, on the module that is trained."""
