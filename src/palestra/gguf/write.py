"""A model as one GGUF file, which llama.cpp, Ollama and their like run.

Tensors are converted and written one after the other; the file is written aside and renamed: it is whole or not there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from palestra.core.errors import PalestraError, did_you_mean
from palestra.gguf import q8
from palestra.gguf.architectures import Architecture, Field, architecture_of, fields_of, rope_tensors, transform_of
from palestra.gguf.write_vocab import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

TYPES = ("f32", "f16", "bf16", "q8_0")
_HEADER_BYTES = 64 * 2**20  # more than any vocabulary takes

Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it will be written: its GGUF name, type and shape, and where it comes from."""

    name: str
    type: str
    shape: tuple[int, ...]
    weights: Mapping[str, torch.Tensor]
    source: str  # its name in `weights`
    change: Callable[[torch.Tensor], torch.Tensor]

    @property
    def nbytes(self) -> int:
        count = torch.Size(self.shape).numel()
        return count // q8.BLOCK * 34 if self.type == "q8_0" else count * {"f32": 4, "f16": 2, "bf16": 2}[self.type]


def write_gguf(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    tokenizer: Any,
    path: Path,
    *,
    type: str = "f16",
    name: str = "palestra model",
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write weights (transformers' names), config, tokenizer and chat template as one GGUF file.

    `type` is that of the matrices: f32, f16, bf16 or q8_0; vectors stay f32.
    """
    if type not in TYPES:
        raise PalestraError(f"the GGUF type {type!r} is not one of {', '.join(TYPES)}.{did_you_mean(type, TYPES)}")
    _require_gguf()
    architecture = architecture_of(config)
    template = chat_template(tokenizer)
    vocabulary = read_vocabulary(tokenizer, config.vocab_size)
    tensors = sorted(_plan(architecture, config, weights, type), key=_in_order)
    total = sum(tensor.nbytes for tensor in tensors)
    aside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path.parent, total + _HEADER_BYTES)
        writer = _writer(aside, architecture, config, type, _shown_name(name, vocabulary))
        _add_vocabulary(writer, vocabulary, template)
        try:
            _write_tensors(writer, tensors, total, progress)
        finally:
            writer.close()
        _flush(aside)
        aside.replace(path)
    except OSError as error:
        raise PalestraError(
            f"{path} could not be written ({error.strerror or error}); free some space or choose another path"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return path


def _plan(
    architecture: Architecture, config: Any, weights: Mapping[str, torch.Tensor], type: str
) -> Iterator[PlannedTensor]:
    import gguf

    key = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    ropes = rope_tensors(config)
    for name, tensor in ropes.items():
        yield PlannedTensor(name, "f32", tuple(tensor.shape), ropes, name, lambda tensor: tensor)
    for source in weights:
        is_copy = source == "lm_head.weight" and config.tie_word_embeddings
        if is_copy or source.endswith("rotary_emb.inv_freq"):  # which old checkpoints hold, and anyone can reckon
            continue
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise PalestraError(
                f"{config.model_type} has no tensor {source!r} in GGUF; give a plain {config.model_type} model"
            )
        shape = tuple(weights[source].shape)
        change = transform_of(architecture, config, source)
        yield PlannedTensor(target, _type_for(shape, type), shape, weights, source, change)


def _in_order(tensor: PlannedTensor) -> list[tuple[int, str]]:
    """By name, with layer 10 after layer 9: the same model gives the same file, wherever its weights were read from."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in tensor.name.split(".")]


def _type_for(shape: tuple[int, ...], type: str) -> str:
    """Vectors stay exact; rows that 8-bit blocks do not divide stay 16-bit."""
    if len(shape) < 2:
        return "f32"
    return "f16" if type == "q8_0" and shape[-1] % q8.BLOCK else type


def _writer(path: Path, architecture: Architecture, config: Any, type: str, name: str) -> GGUFWriter:
    import gguf

    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}[type]
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_name(name)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in fields_of(architecture, config).items():
        _add_field(writer, f"{architecture.name}.{key}", value)
    return writer


def _shown_name(name: str, vocabulary: Vocabulary) -> str:
    """The model's name. llama.cpp reads from it whether special tokens swallow white space, as those of Phi-3 do."""
    if vocabulary.strips_after_special and {"<unk>", "<s>", "</s>", "<|endoftext|>"} <= set(vocabulary.tokens):
        return name if "phi-3" in name.lower() else f"{name} (phi-3)"
    return re.sub("phi-?3", "phi 3", name, flags=re.IGNORECASE)


def _add_field(writer: GGUFWriter, key: str, value: Field) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary, template: str) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    for name, token_id in vocabulary.special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.add_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    writer.add_chat_template(template)


def _write_tensors(writer: GGUFWriter, tensors: list[PlannedTensor], total: int, progress: Progress) -> None:
    import gguf
    import numpy as np

    for tensor in tensors:
        raw = gguf.GGMLQuantizationType[tensor.type.upper()]
        # With a dtype that is not uint8 the shape counts numbers, not bytes.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for tensor in tensors:
        writer.write_tensor_data(_encode(tensor))
        done += tensor.nbytes
        progress(done, total)


def _encode(tensor: PlannedTensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in its GGUF type."""
    values = tensor.change(tensor.weights[tensor.source]).detach().to("cpu").contiguous()
    match tensor.type:
        case "f32":
            return values.float().numpy()
        case "f16":
            half = values.half()
            if not torch.isfinite(half).all():
                raise PalestraError(f"{tensor.name} has numbers that f16 cannot hold; use type bf16 or f32")
            return half.numpy()
        case "bf16":
            return values.bfloat16().view(torch.uint8).numpy()
    return q8.quantize(values)


def chat_template(tokenizer: Any) -> str:
    """The template that the file carries: without it nobody could talk to the model as it was trained."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise PalestraError(
            "the tokenizer has no chat template, so the exported model would not know how a conversation looks; "
            "put a chat_template.jinja into the model's folder"
        )
    return str(template)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PalestraError(
            f"{folder} has {free / 2**20:,.0f} MiB free, and the export needs about {needed / 2**20:,.0f} MiB; "
            "free some space or choose another path"
        )


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise PalestraError("writing GGUF needs the gguf package; pip install 'palestra[gguf]'") from None
