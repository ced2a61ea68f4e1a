"""Palestra's methods of a vLLM worker; this file is imported there, not in a training.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls palestra.extras.vllm.worker.PalestraWorker …
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PalestraWorker:
    """Methods for `/collective_rpc`. vLLM makes it a base class of its worker."""

    model_runner: Any

    def palestra_version(self) -> str:
        """Tells that this class is there."""
        return "1"

    def palestra_reload(self, weights_path: str) -> None:
        """Weights from a folder of safetensors files."""
        self.model_runner.reload_weights(weights_path=weights_path)
        after_reload(self.model_runner.get_model())

    def palestra_load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """The same from memory, where vLLM runs in the process that trains."""
        self.model_runner.reload_weights(weights_iterator=weights)
        after_reload(self.model_runner.get_model())


def after_reload(model: Any) -> None:
    """On a CPU the output head has packed weights of its own, which a reload of tied embeddings leaves as they were."""
    head = getattr(model, "lm_head", None)
    if head is None or getattr(head, "weight", None) is None or head.weight.device.type != "cpu":
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
