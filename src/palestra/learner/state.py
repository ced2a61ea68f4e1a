"""What a learner keeps on disk: weights as safetensors, the rest in one file, exact to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from palestra.core.errors import PalestraError, SettingError, UnreadableFileError

STATE = "learner.pt"
WEIGHTS = "model.safetensors"
SHARDS = "shards"  # of a checkpoint that several ranks wrote
ADAPTER = "adapter_model.safetensors"


def save(folder: Path, model: nn.Module, state: dict[str, Any]) -> None:
    """Write the model (only the adapter where it has one) and the state, with torch's random states."""
    save_model(folder, model)
    with (folder / STATE).open("wb") as file:  # given a path, torch does not say why it cannot be written
        torch.save({**state, "random": random_states()}, file)


def save_model(folder: Path, model: nn.Module) -> None:
    # "auto" would ask the hub about the base model's vocabulary.
    options = {"save_embedding_layers": False} if hasattr(model, "disable_adapter") else {}
    model.save_pretrained(str(folder), **options)  # type: ignore[operator]
    (folder / "README.md").unlink(missing_ok=True)  # peft's card of an adapter is a form to fill in


def load(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Read what `save` wrote into the model; gives the state back."""
    state = read(folder)
    load_model(folder, model)
    set_random_states(state["random"])
    return state


def read(folder: Path) -> dict[str, Any]:
    """The state alone."""
    try:
        state: dict[str, Any] = torch.load(_file(folder, STATE), map_location="cpu", weights_only=True)
    except Exception as error:
        if isinstance(error, PalestraError):
            raise
        raise UnreadableFileError(f"{folder / STATE} is corrupt ({error}); use another checkpoint") from error
    return state


def load_model(folder: Path, model: nn.Module) -> None:
    """Read the weights alone into the model: directly where the names agree, else through transformers."""
    if hasattr(model, "disable_adapter"):
        from peft import set_peft_model_state_dict

        loaded = set_peft_model_state_dict(model, _tensors(folder, ADAPTER))
        if loaded.unexpected_keys:
            raise SettingError(
                f"{folder / ADAPTER} has weights that this model lacks, such as {loaded.unexpected_keys[0]}; "
                "set lora.r and lora.target_modules as they were"
            )
        return
    own = model.state_dict()
    tensors = _tensors(folder, WEIGHTS) if (folder / WEIGHTS).exists() else None
    if tensors is None or not tensors.keys() <= own.keys():
        if not (folder / WEIGHTS).exists() and not list(folder.glob("model-*.safetensors")):
            _file(folder, WEIGHTS)
        fresh = type(model).from_pretrained(str(folder), dtype=next(iter(own.values())).dtype)  # type: ignore[attr-defined]
        tensors = fresh.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape:
                raise UnreadableFileError(
                    f"{folder / WEIGHTS}: {name} has shape {list(tensor.shape)}, expected {list(own[name].shape)}; "
                    "resume with the model of the checkpoint"
                )
            own[name].copy_(tensor)


def random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    path = _file(folder, name)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UnreadableFileError(f"{path} is corrupt ({error}); use another checkpoint") from error


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise UnreadableFileError(f"{path} is missing; use another checkpoint")
    return path
