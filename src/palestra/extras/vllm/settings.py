"""The settings `vllm.*`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from palestra.core.config_sections import WEEK_S, Section


class VllmSection(Section):
    """vLLM as the sampler."""

    mode: Literal["off", "server", "colocate"] = "off"
    """server: a running `vllm serve` at vllm.url; colocate: vLLM in this process"""
    url: str = Field("http://127.0.0.1:8000", description="server: where it answers; rollout.weights_folder is shared")
    timeout_s: float = Field(300.0, gt=0, le=WEEK_S)
    """server: how long it may be away or silent before the run ends"""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1, description="colocate: its share of the GPU's memory")
    max_model_len: int | None = Field(None, ge=1, le=100_000_000)
    """colocate: tokens of a conversation; default the model's"""
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="colocate: GPUs that share the model")

    @model_validator(mode="after")
    def _of_this_mode(self) -> VllmSection:
        """A setting of another mode would have no effect."""
        modes = {"url": "server", "timeout_s": "server"}
        modes |= dict.fromkeys(("gpu_memory_utilization", "max_model_len", "tensor_parallel_size"), "colocate")
        for name, mode in modes.items():
            if self.mode != mode and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"vllm.{name} is for vllm.mode = {mode}, and that is {self.mode}; leave it out")
        return self
