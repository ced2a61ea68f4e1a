"""Run the tests in two parts: most in parallel, then those marked `serial` alone, one after the other.

    python scripts/run_tests.py [pytest arguments]

The last line has the counts of both parts; the exit status is 1 if either part failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

OK = (0, 5)  # 5: no test was selected, which one of the two parts may come to
WORKERS = os.environ.get("TEST_WORKERS", "3")  # on two cores: many tests wait for processes that they started
PARALLEL = ["--workers", WORKERS, "-m", "not serial"]
SERIAL = ["-m", "serial"]


def counts(report: Path) -> dict[str, float]:
    """passed, failed, skipped and seconds of one part; a part that wrote no report has nothing to add."""
    found = dict.fromkeys(("passed", "failed", "skipped", "seconds"), 0.0)
    if not report.is_file():
        return found
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        found["failed"] += failed
        found["skipped"] += skipped
        found["passed"] += int(suite.get("tests", 0)) - failed - skipped
        found["seconds"] += float(suite.get("time", 0))
    return found


def files_with_serial_tests(arguments: list[str]) -> list[str]:
    """So that the second part does not collect the whole suite again; other arguments than paths stay as they are."""
    paths = [Path(argument) for argument in arguments if Path(argument).exists()]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    found = [str(file) for file in files if "mark.serial" in file.read_text(encoding="utf-8")]
    return found + [argument for argument in arguments if not Path(argument).exists()]


def main(arguments: list[str]) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the workers share the cores
    # Hundreds of processes start: each would compile all of Palestra again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    statuses, parts = [], []
    alone = files_with_serial_tests(arguments or ["tests"])
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("parallel", [*PARALLEL, *arguments]), ("serial", [*SERIAL, *alone])):
            report = Path(folder, f"{name}.xml")
            command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}"]
            statuses.append(subprocess.run(command, env=environment).returncode)
            parts.append(counts(report))
    total = {key: sum(part[key] for part in parts) for key in parts[0]}
    times = " + ".join(f"{part['seconds']:.0f}" for part in parts)
    print(f"in {times} s:\n{total['passed']:.0f} passed, {total['failed']:.0f} failed, {total['skipped']:.0f} skipped")
    return int(any(status not in OK for status in statuses) or not total["passed"])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
