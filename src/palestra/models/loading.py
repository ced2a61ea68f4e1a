"""Any accepted model name -> model and tokenizer.

>>> canonical_name("litellm/ollama_chat/hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0")
'Qwen/Qwen3-0.6B'
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from palestra.core.errors import (
    NotFoundError,
    PalestraError,
    SettingError,
    UnreadableFileError,
    UnsupportedError,
    needs_extra,
)
from palestra.core.extras import provided
from palestra.core.machine import SMALL_MODEL_PARAMETERS, processors
from palestra.core.run_folder import RunFolder
from palestra.models.chat.prompts import prepare
from palestra.models.chat.template import ChatFormat
from palestra.models.names import REMEDY, SMOLLM2, TINY, canonical_name, check_name, hub_unreachable, not_in_cache

log = logging.getLogger("palestra")

_UNSTATED_CONTEXT = 1 << 15
_PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|endoftext|>", "<unk>")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, the name it was loaded by, and the folder or hub id it came from."""

    model: Any
    tokenizer: Any
    name: str
    path: str

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def context_tokens(self) -> int:
        """Context length of the model."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or _UNSTATED_CONTEXT)


def load_model(
    name: str, *, dtype: str = "auto", device: str = "auto", quantization: Any | None = None, threads: int | None = None
) -> LoadedModel:
    """Load palestra/tiny, palestra/smollm2, a local folder, a .gguf file or a hub id.

    The dtype `auto` is bfloat16 on a GPU, float32 on a CPU. A folder with a LoRA adapter gives its base with the
    adapter merged in. `quantization` is a transformers quantisation config (4-bit weights cannot be moved later).
    """
    source = canonical_name(name)
    torch_device = device_named(device)
    torch_dtype = dtype_named(dtype, torch_device)
    folder = _folder_of(source)
    if folder is not None and is_adapter(folder):
        if quantization is not None:
            raise UnsupportedError(f"{name} is an adapter, which cannot be loaded in 4 bits; save it merged first")
        base = load_model(base_of(folder), dtype="float32", device=device)
        with _explain_errors(name):
            model = merge_adapter(base.model, folder).to(torch_dtype)
        tokenizer = _read_tokenizer(name, folder, source) if _has_tokenizer(folder) else base.tokenizer
    else:
        tokenizer = _read_tokenizer(name, folder, source)
        model = _read(name, folder, source, partial(_model, torch_dtype, torch_device, quantization))
    _set_tokenizer_defaults(tokenizer)
    # the tokenizer's padding and end-of-turn tokens for the model too: `generate` stops where a turn ends
    generation = model.generation_config
    eos = generation.eos_token_id
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    try:
        ends.update(ChatFormat(tokenizer).stop_token_ids)
    except PalestraError:  # no chat template: text ends at eos
        ends.update([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])
    ends = {end for end in ends if 0 <= end < model.config.get_text_config().vocab_size}
    generation.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
    generation.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    use_softcaps(model)
    path = Path(source).expanduser()  # becomes base_model_name_or_path of adapters: paths must work from everywhere
    model.name_or_path = str(path.resolve()) if path.exists() else source
    choose_threads(model, threads)
    return LoadedModel(model, tokenizer, name, str(folder or source))


def _set_tokenizer_defaults(tokenizer: Any) -> None:
    """A padding token from the vocabulary, and a chat template with tools if the model family is known."""
    if tokenizer.pad_token_id is None:
        vocab = tokenizer.get_vocab()
        tokenizer.pad_token = next((pad for pad in _PADS if pad in vocab), tokenizer.eos_token)
    prepare(tokenizer)


def set_template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Give variables of the chat template a value, unless the caller of the template gives another one."""
    for name, value in variables.items():
        if not name.isidentifier() or not re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
            log.warning("the chat template has no variable %r; its value in chat_template_kwargs has no effect", name)
            continue
        literal = "none" if value is None else json.dumps(value)
        default = f"{{%- set {name} = {name} if {name} is defined else {literal} %}}"
        if not tokenizer.chat_template.startswith(default):
            tokenizer.chat_template = default + tokenizer.chat_template


def use_softcaps(model: Any) -> None:
    """Let the cap of attention's logits count, where a model has one (Gemma 2): transformers' default leaves it out."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


def load_config(name: str) -> Any:
    """The model's config alone; that of its base for an adapter."""
    source = canonical_name(name)
    folder = _folder_of(source)
    if folder is not None and is_adapter(folder):
        return load_config(base_of(folder))
    return _read(name, folder, source, partial(_pretrained, "AutoConfig"))


def load_tokenizer(name: str) -> Any:
    """The tokenizer alone."""
    source = canonical_name(name)
    tokenizer = _read_tokenizer(name, _folder_of(source), source)
    _set_tokenizer_defaults(tokenizer)
    return tokenizer


def choose_threads(model: Any, threads: int | None = None) -> None:
    """Set the CPU threads; without a number, and OMP_NUM_THREADS, one for a small model, else the idle processors.

    The matrices of a small model are too small to split: synchronising threads costs more than it saves.
    """
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return
    is_small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL_PARAMETERS
    torch.set_num_threads(threads or (1 if is_small else idle_processors()))


def idle_processors() -> int:
    """The processors that this process may use and others do not, by the load of the last minute; at least one."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(processors(), torch.get_num_threads(), round((os.cpu_count() or 1) - load)))


def _read_tokenizer(name: str, folder: Path | None, source: str) -> Any:
    if folder is None or _has_tokenizer(folder):
        return _read(name, folder, source, partial(_pretrained, "AutoTokenizer"))
    run = RunFolder.around(folder)
    if run is None:
        raise NotFoundError(
            f"the folder {folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}. Copy them from the model "
            "that it was made from"
        )
    return load_tokenizer(run.config.model.name)  # of 0.1, whose checkpoints have none: the run began with this one


def _pretrained(kind: str, **options: Any) -> Any:
    """What a class of transformers loads, without code of the model."""
    import transformers

    return getattr(transformers, kind).from_pretrained(trust_remote_code=False, **options)


def _model(dtype: torch.dtype, device: torch.device, quantization: Any | None, **where: Any) -> Any:
    load = partial(_pretrained, "AutoModelForCausalLM", dtype=dtype, **where)
    if quantization is not None:
        return load(quantization_config=quantization, device_map={"": device})
    stored = getattr(_pretrained("AutoConfig", **where), "quantization_config", None) or {}
    if (stored if isinstance(stored, dict) else vars(stored)).get("quant_method") != "mxfp4":
        return load().to(device)
    from transformers import Mxfp4Config

    # gpt-oss: 4-bit experts cannot be trained or adapted; dequantised they are bfloat16, whatever is asked for
    return load(quantization_config=Mxfp4Config(dequantize=True)).to(device=device, dtype=dtype)


def _read(name: str, folder: Path | None, source: str, load: Callable[..., Any]) -> Any:
    """Load from a folder; a hub id from the local cache, or else from the hub if that can be reached."""
    where = {"pretrained_model_name_or_path": str(folder or source)}
    if folder is None:
        try:
            return load(local_files_only=True, **where)
        except (OSError, ValueError):
            if reason := hub_unreachable():
                raise not_in_cache(name, reason) from None
    with _explain_errors(name):
        return load(local_files_only=folder is not None, **where)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _folder_of(source: str) -> Path | None:
    """The local folder that the name means; None for a hub id."""
    if source == TINY:
        return Path(__file__).parent / "tiny"
    if source == SMOLLM2:
        return provided("GGUF files")(provided("palestra/smollm2")())
    if source.endswith(".gguf"):
        return provided("GGUF files")(Path(source).expanduser())
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists() and not (folder / "adapter_config.json").exists():
            raise UnreadableFileError(f"the folder {folder} has no config.json, so it is not a model. {REMEDY}")
        return folder
    check_name(source)
    return None


def device_named(device: str) -> torch.device:
    """The device of a name; `auto` is the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise SettingError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:0") from None
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device={device!r}, but CUDA is not available; use device='auto' or 'cpu'")
    return torch_device


def dtype_named(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is bfloat16 on a GPU, float32 on a CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise SettingError(f"dtype={dtype!r} is unknown; use auto, {', '.join(dtypes)}")
    return dtypes[dtype]


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Turn transformers' errors about a missing or broken model into one sentence with a remedy."""
    try:
        yield
    except PalestraError:
        raise
    except Exception as error:  # a damaged file is refused by its own library, each with its own exceptions
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        first_line = " ".join(lines)[:400] if lines[0].endswith(":") else lines[0]  # it announces those below it
        reason = first_line if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {first_line}"
        raise UnreadableFileError(f"the model {name!r} could not be loaded: {reason} {REMEDY}") from error


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


def merge_adapter(base: Any, folder: Path) -> Any:
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
    if recorded and recorded["mark"] != fingerprint(base):
        yield "its weights are different"


def fingerprint(model: Any) -> str:
    """A hash of some rows of the embedding, the same for every dtype that the weights are loaded in."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding = base.get_input_embeddings()
    weight = getattr(embedding, "original_module", embedding).weight
    rows = weight[:: max(1, len(weight) // _FINGERPRINT_ROWS)].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
