"""Scripts that run GPU kernels: on a GPU, or in Triton's interpreter (asked for before Triton is imported)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from forkserver import Forkserver

IMPORTED = (
    "transformers.models.auto.modeling_auto",
    "palestra.engine.engine",
    "palestra.engine.cuda.runner",
    "palestra.learner.head_kernels",
    "palestra.learner.tree_attention",
)


@pytest.fixture(scope="session")
def run_kernels() -> Iterator[Callable[..., tuple[int, str]]]:
    """Call it with a script and its arguments to get the exit status and all that was printed."""
    import torch

    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    server = Forkserver(IMPORTED, env)

    def run(script: str, *arguments: str) -> tuple[int, str]:
        done = server.run("-c", script, *arguments, env=env, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    yield run
    server.close()
