"""Fuzz what takes data from elsewhere: python scripts/fuzz.py [NAME…] [--count N] [--seed N], or `make fuzz` for all.

An input may be refused in one sentence or be accepted. A traceback, more than 5 s until an answer of a
server, or more than 5 s of CPU time for a file or folder, is a fault. Faults are printed as they are found.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from fuzzing.check import run

COUNTS = {
    "gguf_files": 5000,
    "http_requests": 20_000,
    "wire_posts": 5000,
    "run_folders": 2000,
    "tinker_requests": 5000,
    "foreign_runs": 500,
    "model_texts": 100_000,  # all
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*COUNTS, []], help="default: all")
    parser.add_argument("--count", type=int, help="inputs for each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.names or list(COUNTS)
    fuzzers = {name: importlib.import_module(f"fuzzing.{name}").fuzz for name in names}
    return run(fuzzers, {name: options.count or COUNTS[name] for name in names}, options.seed)


if __name__ == "__main__":
    sys.exit(main())
