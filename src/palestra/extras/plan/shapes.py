"""Shapes of models by name: of common ones, of a folder, or of a config.json."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from palestra.core.errors import NotFoundError, UnreadableFileError, did_you_mean
from palestra.plan.shape import ModelShape, shape_from_config

_SUFFIXES = re.compile(r"-(instruct(-\d+|-v[\d.]+)?|base|it|pt|chat|gguf|thinking|v0\.\d)$")
_ALIASES = {"smollm2": "smollm2-135m"}


@cache
def known_shapes() -> dict[str, ModelShape]:
    """Common models by their short names."""
    table = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    dense = {name: ModelShape(**dict(zip(table["columns"], row, strict=True))) for name, row in table["models"].items()}
    return dense | {name: shape_from_config(config, name) for name, config in table["configs"].items()}


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
            raise UnreadableFileError(f"{file} is not JSON: {error}") from None
    known = known_shapes()
    if (short := short_name(name)) in known:
        return known[short]
    raise NotFoundError(
        f"the shape of {name!r} is not known: it is neither a folder with a config.json nor one of {', '.join(known)}."
        f"{did_you_mean(short, known)}"
    )
