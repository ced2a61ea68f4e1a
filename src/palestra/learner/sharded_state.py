"""Weights and optimizer state in the files of torch's distributed checkpoints: each rank writes its shards, and any
number of ranks, one included, reads what it needs of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from palestra.core.errors import PalestraError
from palestra.learner.optimizer import Optimizer

SHARDS = "shards"


def is_sharded(folder: Path) -> bool:
    """Whether several ranks wrote the checkpoint."""
    return (folder / SHARDS).is_dir()


def save_sharded(folder: Path, optimizer: Optimizer) -> None:
    """Write this rank's part; all ranks call it."""
    from torch.distributed.checkpoint import CheckpointException, save

    try:
        save(optimizer.tensors(), checkpoint_id=folder / SHARDS)
    except CheckpointException as error:  # of any rank, with a traceback for each
        raise OSError(f"{folder / SHARDS} could not be written: {_first_failure(error)}") from error


def load_sharded(folder: Path, optimizer: Optimizer) -> None:
    """Read this rank's part; all ranks call it, or one process that has no others."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

    try:
        known = FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
        if any(name.startswith("exp_avg/") for name in known):
            optimizer.make_room()
        else:  # it was written before the first step
            optimizer.reset()
        tensors = optimizer.tensors()
        if wrong := sorted(known.keys() ^ tensors.keys()):
            raise PalestraError(
                f"{folder / SHARDS} and this run differ in their weights, such as {wrong[0].partition('/')[2]}; "
                "resume with the model and the lora settings of the checkpoint"
            )
        alone = not torch.distributed.is_initialized()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            load(tensors, checkpoint_id=folder / SHARDS, no_dist=alone)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        reason = _first_failure(error)
        raise PalestraError(f"{folder / SHARDS} cannot be read ({reason}); use another checkpoint") from error
    optimizer.round_masters()


def _first_failure(error: BaseException) -> str:
    """What the first rank that failed said."""
    failures = list(getattr(error, "failures", {}).items())
    return f"rank {failures[0][0]}: {failures[0][1][0]}" if failures else str(error)


@torch.no_grad()
def load_whole(optimizer: Optimizer, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Take this rank's part of what a single process saved: the state of its optimizer, and its weights by name."""
    low = [name for name, weight in weights.items() if weight.dtype != torch.float32]
    masters = dict(zip(low, state["masters"], strict=False)) if state["masters"] else {}
    moments = state["adamw"]["state"]
    optimizer.make_room() if moments else optimizer.reset()
    whole = {f"weight/{name}": masters.get(name, weight) for name, weight in weights.items()}
    for index, name in enumerate(optimizer.names_by_index()):
        whole |= {f"{kind}/{name}": value for kind, value in moments.get(index, {}).items()}
    for name, own in optimizer.tensors().items():
        value = whole[name].to(own.device, own.dtype)
        if isinstance(own, DTensor):  # every rank has read all of it, so nothing is sent
            value = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
        own.copy_(value)
    optimizer.round_masters()
