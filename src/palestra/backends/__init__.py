"""Learners and policies that run elsewhere, by the library of that system.

`tinker/` trains and samples on a Tinker server, `ray/` samples on actors of a Ray cluster, `vllm/` samples with vLLM.
`train` chooses one by the settings; nothing below this package knows of them.
"""
