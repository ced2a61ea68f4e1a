"""The rollout engine: tokens in, tokens and logprobs out.

Paged KV cache, shared prompts and continuous batching on the module that is being trained.
`cpu/` and `cuda/` hold the decoders for each device. Knows no chat, no tools and no rewards.
"""
