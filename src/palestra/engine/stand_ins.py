"""Functions of transformers' modeling files that ours stand in for, where no package with kernels for them does."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn

from palestra.core.machine import installed_version
from palestra.engine.delta_rule import chunk_gated_delta_rule
from palestra.engine.mamba_scan import mamba_chunk_scan


class StandIn(NamedTuple):
    name: str  # of the function in modeling files
    ours: Callable[..., Any]
    package: str  # whose kernels transformers calls if it is installed


STAND_INS = (
    StandIn("torch_chunk_gated_delta_rule", chunk_gated_delta_rule, "fla"),
    StandIn("mamba2_chunk_scan", mamba_chunk_scan, "mamba_ssm"),
)
Place = tuple[Any, StandIn]  # a modeling file, and what takes the place of one of its functions


def stand_ins_for(layers: Iterable[nn.Module]) -> list[Place]:
    """Where functions of ours are called instead of transformers' own, for these layers."""
    files = {type(layer).__module__: sys.modules[type(layer).__module__] for layer in layers}
    return [
        (file, each)
        for file in files.values()
        for each in STAND_INS
        if hasattr(file, each.name) and (find_spec(each.package) is None or (each.package == "fla" and _fla_refuses()))
    ]


def _fla_refuses() -> bool:
    """Whether flash-linear-attention's backward pass raises an error: Triton compiles it wrongly for Hopper GPUs."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = tuple(int(number) for number in re.findall(r"\d+", installed_version("triton") or "")[:3])
    return (3, 4) <= version < (3, 7, 1)


_lock = Lock()
_users: Counter[Place] = Counter()  # how many passes are inside of `calls`: there are several threads
_theirs: dict[Place, Any] = {}


@contextmanager
def calls(places: Iterable[Place]) -> Iterator[None]:
    """Let these files call the functions that stand in."""
    with _lock:
        for place in places:
            file, found = place
            if not _users[place]:
                _theirs[place] = getattr(file, found.name)
                setattr(file, found.name, found.ours)
            _users[place] += 1
    try:
        yield
    finally:
        with _lock:
            for place in places:
                file, found = place
                _users[place] -= 1
                if not _users[place]:
                    setattr(file, found.name, _theirs.pop(place))
