"""Scripts that run GPU kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from forkserver import Forkserver


@pytest.fixture(scope="session")
def run_kernels(forkserver: Forkserver) -> Callable[..., tuple[int, str]]:
    """Call it with a script and its arguments to get the exit status and all that was printed."""
    import torch

    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})

    def run(script: str, *arguments: str) -> tuple[int, str]:
        done = forkserver.run("-c", script, *arguments, env=env, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    return run
