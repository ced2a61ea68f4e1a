"""A model in shards, one on each rank (FSDP2), and its checkpoints, which any number of ranks can read."""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from palestra.core.errors import SettingError, UnreadableFileError
from palestra.learner.optimizer import Optimizer
from palestra.learner.state import SHARDS

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata


def shard(scorer: Any, *, master_weights: bool) -> None:
    """Leave each rank its part of the scorer's weights: of all, or of the adapters where the rest is frozen.

    Frozen weights stay whole, and shared with the sampler, which needs them whole on every rank: gathering them would
    only take time. With `master_weights` the shards are float32 and passes are computed in the model's own type.
    """
    trained = [p for p in scorer.parameters() if p.requires_grad]
    ignored = {p for p in scorer.parameters() if not p.requires_grad} if trained else set()
    managed = trained or list(scorer.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if master_weights and trained:
        policy = _with_master_weights(trained, policy)
    mesh = init_device_mesh(managed[0].device.type, (dist.get_world_size(),))
    for module in (*scorer.layers, scorer):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        # the loss has the normalisers of the whole step, so gradients of ranks add up
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _with_master_weights(trained: list[nn.Parameter], policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    types = {weight.dtype for weight in trained}
    if types == {torch.float32}:
        return policy
    if len(types) > 1:
        raise SettingError(
            f"model.master_weights over several ranks needs weights of one type, and these are of "
            f"{', '.join(sorted(map(str, types)))}; choose one with model.dtype, or set model.master_weights to false"
        )
    for weight in trained:
        weight.data = weight.data.float()
    return MixedPrecisionPolicy(param_dtype=types.pop(), reduce_dtype=torch.float32, cast_forward_inputs=False)


_METADATA = ".metadata"  # torch writes it as a pickle
_MAX_METADATA_BYTES = 1 << 30
# The names that .metadata of tensors may hold. BytesStorageMetadata is none of them: torch reads such entries with
# an unrestricted unpickler.
_SAFE_NAMES = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "Path"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
}


def save_sharded(folder: Path, optimizer: Optimizer) -> None:
    """Write this rank's part; all ranks call it."""
    from torch.distributed.checkpoint import CheckpointException, save

    try:
        save(optimizer.tensors(), checkpoint_id=folder / SHARDS)
    except CheckpointException as error:  # of any rank, with a traceback for each
        raise OSError(f"{folder / SHARDS} could not be written: {_first_failure(error)}") from error


def load_sharded(folder: Path, optimizer: Optimizer) -> None:
    """Read this rank's part; all ranks call it, or one process that has no others."""
    from torch.distributed.checkpoint import CheckpointException, load

    try:
        reader = _reader(folder / SHARDS)
        known = reader.read_metadata().state_dict_metadata
        if any(name.startswith("exp_avg/") for name in known):
            optimizer.init_moments()
        else:  # it was written before the first step
            optimizer.reset()
        tensors = optimizer.tensors()
        if wrong := sorted(known.keys() ^ tensors.keys()):
            raise SettingError(
                f"{folder / SHARDS} and this run differ in their weights, such as {wrong[0].partition('/')[2]}; "
                "resume with the model and the lora settings of the checkpoint"
            )
        alone = not torch.distributed.is_initialized()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            load(tensors, storage_reader=reader, no_dist=alone)
    except (CheckpointException, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = _first_failure(error)
        raise UnreadableFileError(f"{folder / SHARDS} cannot be read ({reason}); use another checkpoint") from error
    optimizer.round_masters()


def _reader(shards: Path) -> FileSystemReader:
    """A reader of shards that runs no code of the files: its .metadata may hold the names of tensors only."""
    from torch.distributed.checkpoint import FileSystemReader

    class SafeReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            metadata = read_metadata(shards / _METADATA)
            metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
            return metadata

    return SafeReader(shards)


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _SAFE_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{_METADATA} names {module}.{name}, which no checkpoint of ours holds")
        return super().find_class(module, name)


def _check_memo(data: bytes) -> None:
    """Refuse a pickle with a memo index beyond its length: Python allocates a table of up to that index."""
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise pickle.UnpicklingError(f"{_METADATA} is damaged: memo index {argument} in {len(data)} bytes")


def read_metadata(path: Path) -> Metadata:
    """The metadata of shards; UnpicklingError for any content but that of tensors."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_METADATA_BYTES} bytes")
    try:
        data = path.read_bytes()
        _check_memo(data)
        metadata = _SafeUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as error:  # a damaged pickle raises whatever its last whole operation does
        raise pickle.UnpicklingError(f"{_METADATA} is damaged: {error}") from error
    entries = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    is_valid = (
        isinstance(metadata, Metadata)
        and isinstance(entries, dict)
        and isinstance(places, dict)
        and all(isinstance(entry, TensorStorageMetadata) for entry in entries.values())
        and all(Path(name := str(getattr(place, "relative_path", ".."))).name == name for place in places.values())
    )
    if not is_valid:
        raise pickle.UnpicklingError(f"{_METADATA} does not describe tensors in this folder")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


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
    optimizer.init_moments() if moments else optimizer.reset()
    whole = {f"weight/{name}": masters.get(name, weight) for name, weight in weights.items()}
    for index, name in enumerate(optimizer.names_by_index()):
        whole |= {f"{kind}/{name}": value for kind, value in moments.get(index, {}).items()}
    for name, own in optimizer.tensors().items():
        value = whole[name].to(own.device, own.dtype)
        if isinstance(own, DTensor):  # every rank has read all of it, so nothing is sent
            value = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
        own.copy_(value)
    optimizer.round_masters()
