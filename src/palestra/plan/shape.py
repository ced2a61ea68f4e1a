"""The shape of a decoder: all that its cost depends on. By name, from a folder, or from a config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError, did_you_mean

_SUFFIXES = re.compile(r"-(instruct(-\d+|-v[\d.]+)?|base|it|pt|chat|gguf|thinking|v0\.\d)$")
_ALIASES = {"smollm2": "smollm2-135m"}
_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder: attention with grouped heads, a gated MLP, an output head that may be the embedding.

    >>> f"{known_shapes()['qwen3-0.6b'].parameters / 1e6:.0f} M"
    '596 M'
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool  # the output head is the embedding
    context: int | None = None

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices: q, k, v, o, gate, up, down."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.feed_forward

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2) + norms

    @property
    def layer_outputs(self) -> int:
        """Numbers of a token that a layer keeps: its input, and what its products (but the last) and attention give."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * queries + 2 * keys + 2 * self.feed_forward + 2 * self.hidden

    @property
    def linear_outputs(self) -> int:
        """Numbers that the linear layers of one layer give for a token."""
        return self.layer_outputs - self.heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers in the KV cache for a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapter_weights(self, rank: int) -> int:
        """Weights of LoRA on all linear layers but the head."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.feed_forward)
        return self.layers * rank * sides


def shape_from_config(config: Mapping[str, Any], name: str = "the config") -> ModelShape:
    """The shape in a transformers config, as a mapping."""
    config = config.get("text_config") or config
    if any(config.get(key) for key in _EXPERTS):
        raise PalestraError(f"{name} has experts; the cost model knows dense decoders only, such as qwen3-8b")
    missing = [key for key in _KEYS.values() if not isinstance(config.get(key), int)]
    if missing:
        raise PalestraError(f"{name} has no {', '.join(missing)}; expected the config.json of a decoder")
    sizes = {field: int(config[key]) for field, key in _KEYS.items()}
    heads = sizes["heads"]
    return ModelShape(
        **sizes,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or sizes["hidden"] // heads,
        tied=bool(config.get("tie_word_embeddings", "gemma" in str(config.get("model_type")))),
        context=config.get("max_position_embeddings"),
    )


def shape_of(config: Any) -> ModelShape | None:
    """The shape of a transformers config object; None for what the cost model does not know."""
    try:
        return shape_from_config(config.to_dict())
    except (AttributeError, PalestraError):
        return None


@cache
def known_shapes() -> dict[str, ModelShape]:
    """Common models by their short names."""
    table = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    return {name: ModelShape(**dict(zip(table["columns"], row, strict=True))) for name, row in table["models"].items()}


def short_name(name: str) -> str:
    """
    >>> short_name("Qwen/Qwen3-8B"), short_name("meta-llama/Llama-3.1-8B-Instruct"), short_name("palestra/smollm2")
    ('qwen3-8b', 'llama-3.1-8b', 'smollm2-135m')
    """
    bare = name.rpartition("/")[2].partition(":")[0].lower().removeprefix("meta-")
    while (cut := _SUFFIXES.sub("", bare)) != bare:
        bare = cut
    return _ALIASES.get(bare, bare)


def find_shape(name: str) -> ModelShape:
    """By a known name, a hub id of a known model, a model's folder, or a config.json."""
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        try:
            return shape_from_config(json.loads(file.read_text(encoding="utf-8")), str(file))
        except ValueError as error:
            raise PalestraError(f"{file} is not JSON: {error}") from None
    known = known_shapes()
    if (short := short_name(name)) in known:
        return known[short]
    raise PalestraError(
        f"the shape of {name!r} is not known: it is neither a folder with a config.json nor one of {', '.join(known)}."
        f"{did_you_mean(short, known)}"
    )
