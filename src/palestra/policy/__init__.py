"""Policies sample turns: `base` defines the interface, `local` samples with the engine, `naive` without it.

`remote` samples from another Palestra process, `openai` from an OpenAI-style API.
vLLM, Tinker and Ray are in `extras`.
"""
