"""`isolated_child.py --path FOLDER atropos_child.py ROOTS PACKAGE FILE COMMAND …`: run an Atropos environment.

The file runs unmodified, as `python -m PACKAGE.FILE` if it has a package. Imports nothing of Palestra: the environment
has a Python of its own.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def server_configs(
    default_server_configs: Any, openai_config_dict: Any, yaml_config: Any, cli_passed_flags: Any, logger: Any
) -> list[Any]:
    """Replace `resolve_openai_configs` of atroposlib 0.4.0: the given settings, for each server that the file names.

    The original ignores base_url unless the file gives a list, and rejects settings for more than one server.
    """
    config_class = importlib.import_module("atroposlib.envs.base").APIServerConfig
    given = dict(yaml_config.get("openai") or {})
    given |= {name[7:]: value for name, value in cli_passed_flags.items() if name.startswith("openai.")}
    servers = default_server_configs if isinstance(default_server_configs, list) else [default_server_configs]
    return [config_class(**{**server.model_dump(), **given}) for server in servers or [config_class()]]


def main(roots: str, package: str, file: str, *words: str) -> None:
    sys.path += [root for root in roots.split(os.pathsep) if root]  # last: a repository may hold an atroposlib, too
    base: Any = importlib.import_module("atroposlib.envs.base")
    base.resolve_openai_configs = server_configs
    sys.argv = [file, *words]
    if package:
        runpy.run_module(f"{package}.{Path(file).stem}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
