"""Policies that sample with vLLM: a server (`vllm.mode: server`) or in this process (`colocate`)."""
