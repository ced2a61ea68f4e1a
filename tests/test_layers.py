"""Who may import whom: the rules of docs/design.md, kept by walking every import of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "palestra"

# room -> the rooms it may import. Read upwards: each line uses only lines above it, so there are no circles.
MAY_IMPORT = {
    "core": "",
    "chat": "core",
    "tools": "core",
    "algo": "core",
    "plan": "core",
    "engine": "core",
    "gguf": "core",
    "models": "core chat gguf",
    "tracking": "core",
    "export": "core models gguf",
    "agents": "core tools",
    "evals": "core chat",
    "report": "core evals",
    "envs": "core chat tools agents evals",
    "runs": "core tracking envs",
    "learner": "core algo plan engine",
    "policy": "core chat engine",
    "rollout": "core chat tools evals envs policy",
    "tinker_client": "core algo learner policy",
    "cluster": "core policy rollout",
    "serve": "core chat engine models policy",
    "tinker": "core algo engine models tracking runs learner policy serve",
    "train": "core chat algo plan learner models tracking export evals envs report runs policy rollout tinker_client "
    "cluster",
    "wire": "core chat models envs policy rollout serve train",
    "gateway": "core chat models envs evals policy rollout serve train",
    "dashboard": "core models evals report runs serve",
    "harness": "core agents evals envs models policy rollout serve gateway train",
    "bench": "core algo plan engine models learner policy",
    "result": "core chat tools agents evals export models policy rollout train",
    "api": "core agents evals envs models policy rollout harness train result",
    "env_api": "core chat agents envs evals models policy rollout train wire result api",
    "suite": "evals api",
    "__init__": "tools agents evals envs api suite",
    "demo": "__init__",
    "faces": "core plan tools chat gguf models export agents evals envs report policy rollout runs serve tinker train "
    "wire gateway harness bench dashboard result api env_api suite __init__",
    "__main__": "faces",
}

# library -> the rooms that may import it at module level. Elsewhere it is imported where it is used, or not at all.
HEAVY = {
    "torch": "algo bench cluster engine export gguf learner models policy tinker tinker_client train",
    "transformers": "engine gguf learner models policy train",
    "peft": "learner",
    "safetensors": "export gguf learner models train",
    "numpy": "core chat dashboard rollout algo engine export gguf learner models policy tinker tinker_client train",
    "triton": "engine learner",
    "tinker": "tinker_client",
    "ray": "cluster",
    "trl": "",
    "datasets": "",
    "pyarrow": "",
    "starlette": "dashboard serve tinker wire gateway harness",
    "uvicorn": "serve wire",
    "httpx": "",
}

# What only single files may import at module level: they are loaded when their tracker or server is asked for.
ONE_FILE = {
    "wandb": "tracking/wandb.py",
    "mlflow": "tracking/mlflow.py",
    "trackio": "tracking/trackio.py",
    "tensorboard": "tracking/tensorboard.py",
    "mcp": "faces/mcp_server.py",
    "fastapi": "faces/http_api.py",
}

IMPORT_MODULES, HELP_MODULES = 30, 200  # that a start may load; 6 and 88 with Python 3.11
FACES_ONLY = ("click", "rich")


class Import(NamedTuple):
    file: str  # below src/palestra
    line: int
    module: str
    at_load: bool  # runs when the file is imported, not when a function is called or types are checked

    @property
    def room(self) -> str:
        return _room(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[Import]:
    file = path.relative_to(PACKAGE).as_posix()
    tree = _parsed(path)
    at_load = {id(node) for node in _run_at_load(tree.body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            base = [node.module]
            modules = [f"palestra.{a.name}" for a in node.names] if node.module == "palestra" else base
        else:
            continue
        for module in modules:
            yield Import(file, node.lineno, module, id(node) in at_load)


def _run_at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _run_at_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from _run_at_load(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _run_at_load(handler.body)


def _room(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def _target(module: str) -> str:
    """The room that a palestra module lies in; public names of `palestra` itself count as `__init__`."""
    name = module.split(".")[1]
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else "__init__"


ALL = [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path)]
OURS = [found for found in ALL if found.module.startswith("palestra.")]


def test_every_room_has_a_rule() -> None:
    rooms = {_room(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert rooms <= set(MAY_IMPORT), f"no rule for {sorted(rooms - set(MAY_IMPORT))}; add it to MAY_IMPORT"


def test_the_rules_point_one_way() -> None:
    seen: set[str] = set()
    for room, below in MAY_IMPORT.items():
        assert set(below.split()) <= seen, f"{room} may import {below}, of which some stand below it in the table"
        seen.add(room)


def test_rooms_import_only_the_rooms_below_them() -> None:
    wrong = [
        found
        for found in OURS
        if _target(found.module) != found.room and _target(found.module) not in MAY_IMPORT.get(found.room, "").split()
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Also not by imports inside of functions, or for types alone."""
    modules = {_module(path) for path in PACKAGE.rglob("*.py")}
    below: dict[str, set[str]] = {module: set() for module in modules}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("palestra"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                below[_module(path)] |= {name if name in modules else str(node.module) for name in names} & modules
    while leaves := [module for module, others in below.items() if not others - {module}]:
        for module in leaves:
            del below[module]
        for others in below.values():
            others.difference_update(leaves)
    assert not below, f"these import each other in a circle: {sorted(below)}"


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_in_their_rooms(library: str) -> None:
    wrong = [f for f in _loading(library) if f.room not in HEAVY[library].split() and f.file not in ONE_FILE.values()]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("library", ONE_FILE)
def test_such_libraries_stay_in_their_file(library: str) -> None:
    wrong = [found for found in _loading(library) if found.file != ONE_FILE[library]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("library", FACES_ONLY)
def test_only_faces_talk_to_the_terminal(library: str) -> None:
    wrong = [found for found in ALL if found.module.split(".")[0] == library and found.room != "faces"]
    # bars for scripts and notebooks, which have no face
    wrong = [found for found in wrong if found.file != "train/progress.py"]
    assert not wrong, "\n".join(map(str, wrong))


def test_algo_knows_no_config() -> None:
    wrong = [f for f in OURS if f.room == "algo" and "config" in f.module]
    assert not wrong, "\n".join(map(str, wrong))


# All that the loop may know of whoever samples and learns: protocols, and functions that take them.
LOOP_KNOWS = {
    "palestra.learner.base",
    "palestra.learner.memory",
    "palestra.policy.base",
}


def test_the_loop_knows_no_concrete_learner_or_policy() -> None:
    seams = ("learner", "policy", "rollout", "engine", "wire", "serve")
    known = {f.module for f in OURS if f.file == "train/loop.py" and _target(f.module) in seams}
    assert known == LOOP_KNOWS


@pytest.mark.parametrize(
    ("code", "most_modules"),
    [
        ("import palestra", IMPORT_MODULES),
        ("from palestra.faces.cli.main import run; assert run(['--help']) == 0", HELP_MODULES),
    ],
    ids=["import palestra", "palestra --help"],
)
def test_starts_with_few_modules_and_without_torch(code: str, most_modules: int) -> None:
    """Count modules instead of seconds, since the time depends on the machine's load."""
    check = (
        f"import sys; before = set(sys.modules); {code}; new = set(sys.modules) - before; "
        "assert not {'torch', 'transformers', 'pydantic'} & new; print(len(new), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert int(done.stderr.split()[-1]) <= most_modules


def test_agent_files_are_read_without_torch() -> None:
    """A mistake in a user's file is told at once, before anything heavy is loaded."""
    code = "import sys, palestra.faces.cli.agent_file as a; a.load_agent_file(None); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _loading(library: str) -> list[Import]:
    return [found for found in ALL if found.module.split(".")[0] == library and found.at_load]
