"""LoRA adapter folders, merged into their base model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from palestra.core.errors import NotFoundError, UnreadableFileError, needs_extra

RECORD = "palestra.json"  # what a run saves beside its model
_FINGERPRINT_ROWS = 16


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The name of the model that the adapter was trained on."""
    base = _named_base(folder)
    seen = [folder.resolve()]
    while is_adapter(below := Path(_named_base(seen[-1])).expanduser().resolve()):
        if below in seen:
            raise UnreadableFileError(
                f"{folder}/adapter_config.json leads back to itself as its base model; set its "
                "base_model_name_or_path to the model that it was trained on"
            )
        seen.append(below)
    lowest = _named_base(seen[-1])
    if Path(lowest).is_absolute() and not Path(lowest).exists():
        raise NotFoundError(
            f"the adapter in {seen[-1]} needs its base model, and {lowest} is not there; bring it back, or set "
            "base_model_name_or_path in its adapter_config.json to where it is now"
        )
    return base


def _named_base(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not base or not isinstance(base, str):
        raise UnreadableFileError(f"{folder}/adapter_config.json names no base model; set its base_model_name_or_path")
    return base


def base_record(model: Any) -> dict[str, Any]:
    """The base model in an adapter's record: its name and a fingerprint of its weights."""
    # "mark" is the fingerprint's key since v0.1, whose records must stay readable
    return {"base": {"name": model.active_peft_config.base_model_name_or_path or "", "mark": _fingerprint(model)}}


def merge(base: Any, folder: Path) -> Any:
    """The base model with the adapter's weights added in: an ordinary model, to run or to train further."""
    with needs_extra(f"the LoRA adapter in {folder}", "lora"):
        from peft import PeftModel
    if mismatch := next(_mismatches(base, folder), None):
        raise UnreadableFileError(
            f"the adapter in {folder} was trained on another base than {base_of(folder)}: {mismatch}. Set "
            "base_model_name_or_path in its adapter_config.json to the model that it was trained on."
        )
    try:
        return PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except (ValueError, RuntimeError, OSError) as error:
        raise UnreadableFileError(
            f"the adapter in {folder} cannot be merged into {base_of(folder)}: {str(error).splitlines()[0]}"
        ) from error


def _mismatches(base: Any, folder: Path) -> Iterator[str]:
    """Where an adapter does not match the layers or the weights of the base."""
    from safetensors import safe_open

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise UnreadableFileError(
            f"{folder} has an adapter_config.json but no adapter_model.safetensors; copy it again"
        )
    layers = dict(base.named_modules())
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            layer_name, separator, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if not separator:
                continue
            weight = getattr(layers.get(layer_name), "weight", None)
            if weight is None:
                yield f"it has no layer {layer_name}"
            elif isinstance(layers[layer_name], torch.nn.Linear) and weight.dim() == 2:
                width = file.get_slice(name).get_shape()[1]
                height = file.get_slice(name.replace(".lora_A.", ".lora_B.")).get_shape()[0]
                if (height, width) != tuple(weight.shape):
                    yield f"its {layer_name} is {tuple(weight.shape)}, the adapter's is {(height, width)}"
    record = folder / RECORD
    recorded = json.loads(record.read_text()).get("base") if record.is_file() else None
    if recorded and recorded["mark"] != _fingerprint(base):
        yield "its weights are different"


def _fingerprint(model: Any) -> str:
    """A hash of some rows of the embedding, the same for every dtype that the weights are loaded in."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding = base.get_input_embeddings()
    weight = getattr(embedding, "original_module", embedding).weight
    rows = weight[:: max(1, len(weight) // _FINGERPRINT_ROWS)].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
