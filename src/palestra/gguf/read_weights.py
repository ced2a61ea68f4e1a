"""A GGUF file's tensors -> the weights of a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from palestra.core.errors import PalestraError
from palestra.gguf.file import GgufFile

_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # read into the config


def fill(model: Any, file: GgufFile, dtype: torch.dtype) -> None:
    """Put every tensor of the file where it belongs in `model`, which may be on the meta device."""
    names = _names(model, file)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if unknown := sorted(set(file.tensors) - set(names.values()) - _NOT_WEIGHTS):
        raise PalestraError(
            f"{file.path} has tensors that a {file.architecture} model does not have: {', '.join(unknown[:3])}; "
            "give its Hugging Face folder instead"
        )
    weights = {}
    for name, stored in names.items():
        if stored not in file.tensors:
            raise PalestraError(f"{file.path} has no tensor {stored}, so it is not whole; download or copy it again")
        array = torch.tensor(file.tensor(stored))  # a copy: the file is mapped, and read-only
        weights[name] = _restore(file.architecture, name, model.config)(array).to(dtype).contiguous()
        if tuple(weights[name].shape) != shapes[name]:
            raise PalestraError(
                f"{file.path}: the tensor {stored} has the shape {tuple(array.shape)}, its metadata say "
                f"{shapes[name]}; the file is broken, download or copy it again"
            )
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()


def _names(model: Any, file: GgufFile) -> dict[str, str]:
    """transformers' name -> the file's, for every weight that the file has to hold."""
    import gguf

    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: str(known.get_name(name, (".weight", ".bias"))) for name in model.state_dict() if name not in tied}


def _restore(architecture: str, name: str, config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The inverse of what a writer of GGUF does to this weight."""
    if architecture == "llama" and "q_proj" in name:
        return lambda w: _halves_together(w, config.num_attention_heads)
    if architecture == "llama" and "k_proj" in name:
        return lambda w: _halves_together(w, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return lambda w: w - 1  # Gemma scales by 1 + weight, GGUF keeps the sum
    return lambda w: w


def _halves_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order to the (half, pair) order of transformers' rotary embedding."""
    by_pair = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(weight.shape)
