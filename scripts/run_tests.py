"""Run the tests in several processes, and then those marked `serial` one after the other (tests/support/workers.py).

python scripts/run_tests.py [pytest arguments]
"""

from __future__ import annotations

import os
import sys

WORKERS = os.environ.get("TEST_WORKERS", "4")  # on two cores: many tests wait for processes that they started

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers share the cores
    # Hundreds of processes start: each would compile all of Palestra again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A GPU that was asked for while tests were collected could not be used in the workers, which are forked then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "--workers", WORKERS, *sys.argv[1:]])
