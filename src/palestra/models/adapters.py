"""A LoRA adapter folder onto its base model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from palestra.core.errors import PalestraError

RECORD = "palestra.json"  # what a run leaves beside its model
_MARKED_ROWS = 16


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The name of the model that the adapter was trained on."""
    base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise PalestraError(f"{folder}/adapter_config.json names no base model; set its base_model_name_or_path")
    return str(base)


def base_record(model: Any) -> dict[str, Any]:
    """What the record beside an adapter says of its base: the name, and a mark by which it is known again."""
    return {"base": {"name": getattr(model.config, "_name_or_path", ""), "mark": _mark(model)}}


def merged(base: Any, folder: Path) -> Any:
    """The base model with the adapter's weights added in: a plain model, to run or to train on."""
    try:
        from peft import PeftModel
    except ImportError:
        raise PalestraError(f"{folder} is a LoRA adapter, which needs peft; pip install 'palestra[lora]'") from None
    for fault in _misfits(base, folder):
        raise PalestraError(
            f"the adapter in {folder} was made for another base than {base_of(folder)}: {fault}. Set "
            "base_model_name_or_path in its adapter_config.json to the model that it was trained on."
        )
    try:
        return PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except (ValueError, RuntimeError, OSError) as error:
        raise PalestraError(
            f"the adapter in {folder} cannot be put onto {base_of(folder)}: {str(error).splitlines()[0]}"
        ) from error


def _misfits(base: Any, folder: Path) -> Iterator[str]:
    """Where an adapter's matrices do not fit the base's layers."""
    from safetensors import safe_open

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise PalestraError(f"{folder} has an adapter_config.json but no adapter_model.safetensors; copy it again")
    layers = dict(base.named_modules())
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            layer_name, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if not found:
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
    known = json.loads(record.read_text()).get("base") if record.is_file() else None
    if known and known["mark"] != _mark(base):
        yield "its weights are others"


def _mark(model: Any) -> str:
    """A hash of some of the embedding: the same in every precision that the weights are loaded in."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding = plain.get_input_embeddings()
    weight = getattr(embedding, "original_module", embedding).weight
    rows = weight[:: max(1, len(weight) // _MARKED_ROWS)].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
