"""Scripts that run GPU kernels: on a GPU, or in Triton's interpreter (asked for before Triton is imported).

Each script has a process of its own, forked from one in which the imports, most of a script's time, are done already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

FORKING = """
import json, os, sys, traceback
import torch, transformers
import palestra.engine.engine, palestra.engine.cuda.runner, palestra.learner.head_kernels

for line in sys.stdin:
    script, arguments, output = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv[1:] = arguments
        exec(script, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
"""


@pytest.fixture(scope="session")
def run_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[int, str]]]:
    """Call it with a script and its arguments to get the exit status and all that was printed."""
    import torch

    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdin is not None
    assert process.stdout is not None
    outputs = tmp_path_factory.mktemp("kernels")

    def run(script: str, *arguments: str) -> tuple[int, str]:
        output = outputs / f"{len(list(outputs.iterdir()))}.txt"
        print(json.dumps([script, arguments, str(output)]), file=process.stdin, flush=True)
        status = process.stdout.readline()
        assert status, "the process from which the scripts are forked has died"
        return int(status), output.read_text()

    yield run
    process.stdin.close()
    process.wait(20)
