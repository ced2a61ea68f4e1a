"""Cases of tests over families of models: `make test` takes one of each kind."""

from __future__ import annotations

from typing import Any

import pytest

# plain, two kinds of windows, experts with and without sinks, latent attention, and three kinds of recurrent layers
ONE_OF_EACH_KIND = ("llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2", "nemotron_h")
SLOW = pytest.mark.slow("make test-slow takes every family")


def quick_case(family: str, *more: Any) -> Any:
    """A case that `make test-slow` alone runs if another family stands for its kind."""
    return pytest.param(family, *more, marks=() if family in ONE_OF_EACH_KIND else SLOW)
