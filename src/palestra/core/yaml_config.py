"""A run's settings from one YAML file: our own sections, and those of other GRPO trainers."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, did_you_mean

MAX_YAML_NODES = 100_000
MAX_YAML_DEPTH = 100

# Settings under names that users of other trainers know -> the same setting here.
TRANSLATIONS = {
    "model.base_model_name": "model.name",
    "model.max_new_tokens": "rollout.max_new_tokens",
    "rl.training.per_device_train_batch_size": "train.problems_per_step",
    "rl.training.learning_rate": "train.learning_rate",
    "rl.training.num_train_epochs": "train.epochs",
    "rl.training.max_steps": "train.max_steps",
    "rl.generation.num_generations": "rollout.group_size",
    "rl.generation.temperature": "rollout.temperature",
    "rl.generation.top_p": "rollout.top_p",
    "wandb.enabled": "track.report_to",
    "wandb.project": "track.project",
    "wandb.entity": "track.entity",
}


def read_yaml_config(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, by their dotted names, ready for `RunConfig.build`."""
    return translate(flatten(load_yaml(path)), str(path))


def load_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file as they are."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        data = parse_yaml(text)
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), path)
    except FileNotFoundError:
        raise PalestraError(
            f"there is no config file {path}; `palestra config my_agent.py > {path}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise PalestraError(f"the config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise PalestraError(f"the config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is not None and not isinstance(data, dict):
        raise PalestraError(f"the config file {path} holds a {type(data).__name__}; expected sections such as 'train:'")
    return data or {}


def parse_yaml(text: str) -> Any:
    """The content of a YAML document; yaml.YAMLError if it is nested too deeply, or its aliases stand for too much."""
    import yaml

    steps = ((char in "[{") - (char in "]}") for char in re.sub(r"[^][{}]+", "", text))
    if max(accumulate(steps), default=0) > MAX_YAML_DEPTH:  # PyYAML takes seconds to find that out
        raise yaml.YAMLError(f"it is nested more than {MAX_YAML_DEPTH} levels deep")
    sizes: dict[int, int] = {}  # expanded nodes, by node; a node that is being counted is absent

    def size(node: Any, path: frozenset[int]) -> int:
        if id(node) in path:
            raise yaml.YAMLError("an alias refers to the node that contains it")
        if id(node) not in sizes:
            pairs = node.value if isinstance(node, yaml.CollectionNode) else []
            below = [part for pair in pairs for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(size(part, path | {id(node)}) for part in below)
            if sizes[id(node)] > MAX_YAML_NODES:
                raise yaml.YAMLError(f"with its aliases expanded, it has more than {MAX_YAML_NODES} nodes")
        return sizes[id(node)]

    if (root := yaml.compose(text, yaml.SafeLoader)) is not None:
        size(root, frozenset())
    return yaml.safe_load(text)


def _refuse_repeated_keys(root: Any, path: Path) -> None:
    """PyYAML takes the last of two keys that are the same, and drops what the first one held."""
    import yaml

    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias may lead back
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            nodes.extend(value for _, value in node.value)
            keys: dict[str, int] = {}
            for key in (k for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != "<<"):
                line = key.start_mark.line + 1
                if key.value in keys:
                    lines = f"lines {keys[key.value]} and {line}"
                    raise PalestraError(f"the config file {path} has {key.value!r} twice, in {lines}; make it one")
                keys[key.value] = line


def flatten(data: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names; a section without content counts for nothing.

    >>> flatten({"train": {"learning_rate": 2e-5}, "lora.r": 8, "echo": None})
    {'train.learning_rate': 2e-05, 'lora.r': 8}
    """
    known = (*RunConfig.keys(), *TRANSLATIONS)
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        found = {}
        if isinstance(value, dict):
            found = flatten(value, f"{key}.")
        elif value is not None or not any(k.startswith(f"{key}.") for k in known):
            found = {key: value}
        if twice := sorted(flat.keys() & found):
            raise PalestraError(f"{twice[0]} is given twice, in its section and by its dotted name; keep one of them")
        flat |= found
    return flat


def translate(flat: dict[str, Any], where: str) -> dict[str, Any]:
    """Other trainers' names into ours; unknown names, and one setting given under two names, are refused."""
    known = [*RunConfig.keys(), *TRANSLATIONS]
    for key, value in flat.items():
        if any(k.startswith(f"{key}.") for k in known):
            raise PalestraError(
                f"{where}: {key!r} is {value!r}; it is a section, with settings such as "
                f"{next(k for k in known if k.startswith(f'{key}.'))}"
            )
        if key not in known:
            raise PalestraError(f"{where}: unknown setting {key!r}.{did_you_mean(key, known)}")
    out: dict[str, Any] = {}
    for key, value in flat.items():
        name = TRANSLATIONS.get(key, key)
        if name in out:
            twice = " and ".join(k for k in flat if TRANSLATIONS.get(k, k) == name)
            raise PalestraError(f"{where}: {twice} are one setting; keep one of them")
        out[name] = _trackers(value, where) if key == "wandb.enabled" else value
    return out


def _trackers(enabled: Any, where: str) -> list[str]:
    if not isinstance(enabled, bool):
        raise PalestraError(f"{where}: wandb.enabled is {enabled!r}; expected true or false")
    return ["wandb"] if enabled else []
