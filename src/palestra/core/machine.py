"""What this machine has: processors, memory, free ports, installed packages."""

from __future__ import annotations

import os
import socket
from importlib import metadata

SMALL_MODEL_PARAMETERS = 20_000_000  # below, a matrix product is too small to be split among threads


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def port_error(port: int) -> str | None:
    """Why this port of the loopback address cannot be opened; 0 is any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error.strerror)
    return None


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
