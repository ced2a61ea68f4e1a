"""The import rules of docs/design.md, checked against every import in the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from palestra.core.extras import COMMANDS, EXTRAS, PROVIDES, SETTINGS, load

PACKAGE = Path(__file__).parents[1] / "src" / "palestra"

# package or module -> what it may import. Each line names only lines above it, so there are no cycles.
MAY_IMPORT = {
    "core": "",
    "algo": "core",
    "plan": "core",
    "models": "core",
    "engine": "core",
    "evals": "core",
    "agents": "core",
    "policy": "core models engine",
    "envs": "core models evals agents",
    "runs": "core envs",
    "rollout": "core models evals agents policy envs",
    "learner": "core algo plan engine",
    "servers": "core models policy rollout",
    "train": "core algo plan models evals policy envs runs rollout learner",
    "sources": "core models agents policy envs rollout servers train",
    "result": "core models evals agents policy rollout train",
    "trainer": "core models evals agents envs runs rollout train sources result",
    "api": "core evals agents policy envs rollout train result trainer",
    "env_api": "core models evals agents policy envs rollout train result trainer",
    "agent_source": "core evals agents sources servers",  # servers: an address without a token is refused at once
    "run": "core models envs runs train agent_source api env_api",
    "suite": "evals api",
    "__init__": "core evals agents envs api suite",
    "demo": "__init__",
    "cli": "core models evals agents envs policy runs rollout servers train api env_api agent_source run",
    "__main__": "cli",
    # the core ends here; no line above names an extra, and no extra another one
    "extras": "",
    "extras.adapters": "core agents envs",
    "extras.agent_tools": "core agents evals envs runs servers cli",
    "extras.atropos": "core evals models envs policy rollout runs servers train run env_api cli",
    "extras.dashboard": "core evals models runs servers cli",
    "extras.distill": "core algo envs evals learner models rollout train",
    "extras.environments": "core evals envs",
    "extras.gguf": "core models",
    "extras.hub": "core models",
    "extras.plan": "core plan runs cli",
    "extras.rescore": "core envs evals rollout agent_source cli train",
    "extras.ranks": "core algo learner rollout",
    "extras.step_trainer": "core algo envs learner models policy rollout runs train",
    "extras.ray": "core models policy rollout train",
    "extras.record": "core evals servers sources cli",
    "extras.tinker": "core algo engine models learner policy runs servers train cli",
    "extras.trl": "core agents evals models rollout trainer",
    "extras.vllm": "core models policy",
}

# library -> the folders whose files may import it at module level. Elsewhere it is imported inside of functions.
HEAVY = {
    "torch": "algo engine engine/cpu engine/cuda extras/distill extras/gguf extras/ranks extras/ray "
    "extras/tinker extras/tinker/client extras/tinker/server learner models models/export policy train",
    "transformers": "learner",
    "peft": "",
    "safetensors": "extras/gguf learner models/export train",
    "numpy": "algo core engine engine/cpu engine/cuda extras/atropos extras/dashboard extras/distill extras/gguf "
    "extras/ranks extras/tinker extras/tinker/client extras/tinker/server extras/vllm learner models/chat train",
    "triton": "engine/cuda learner",
    "tinker": "extras/tinker/client",
    "ray": "extras/ray",
    "vllm": "",
    "datasets": "",
    "pyarrow": "",
    "wandb": "",
    "mlflow": "",
    "trackio": "",
    "tensorboard": "",
    "starlette": "extras/agent_tools extras/atropos extras/dashboard extras/record extras/tinker/server servers "
    "servers/gateway servers/openai sources/programs",
    "uvicorn": "servers",
    "httpx": "",
}

# library -> the one file that may import it at module level. The file is imported when its server is used.
ONE_FILE = {
    "mcp": "extras/agent_tools/mcp_server.py",
}

# Lines of Python in src/palestra, and those outside of extras/; each change of a limit is a commit of its own.
MOST_LINES, MOST_CORE_LINES = 66_250, 48_000
IMPORT_MODULES, HELP_MODULES = 30, 200  # limits on loaded modules; 6 and 88 with Python 3.11
TERMINAL = ("click", "rich")


class Import(NamedTuple):
    file: str  # below src/palestra
    line: int
    module: str
    at_load: bool  # runs when the file is imported, not when a function is called or types are checked

    @property
    def package(self) -> str:
        return _package(self.file)

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]

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


def _package(file: str) -> str:
    first, *rest = file.split("/")
    return f"extras.{rest[0]}" if first == "extras" and len(rest) > 1 else first.removesuffix(".py")


def _target(module: str) -> str:
    """The package of a palestra module; public names of `palestra` itself count as `__init__`."""
    name, *rest = module.split(".")[1:]
    if name == "extras" and rest:
        return f"extras.{rest[0]}"
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else "__init__"


ALL = [each for path in sorted(PACKAGE.rglob("*.py")) for each in imports_of(path)]
OURS = [each for each in ALL if each.module.startswith("palestra.")]


def test_the_source_keeps_to_its_number_of_lines() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in PACKAGE.rglob("*.py")}
    core = {path: count for path, count in lines.items() if PACKAGE / "extras" not in path.parents}
    assert sum(lines.values()) <= MOST_LINES
    assert sum(core.values()) <= MOST_CORE_LINES


@pytest.mark.extras
def test_every_package_has_a_rule() -> None:
    packages = {_package(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert packages == set(MAY_IMPORT), f"MAY_IMPORT differs from src: {sorted(packages ^ set(MAY_IMPORT))}"


def test_rules_name_only_earlier_packages() -> None:
    seen: set[str] = set()
    for package, below in MAY_IMPORT.items():
        assert set(below.split()) <= seen, f"{package} may import {below}, of which some come later in the table"
        seen.add(package)


def test_packages_import_only_what_their_rule_names() -> None:
    wrong = [each for each in OURS if _target(each.module) not in [each.package, *MAY_IMPORT[each.package].split()]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.extras
def test_every_permission_is_used() -> None:
    used = {(each.package, _target(each.module)) for each in OURS}
    granted = {(package, below) for package, names in MAY_IMPORT.items() for below in names.split()}
    assert not granted - used, f"remove from MAY_IMPORT: {sorted(granted - used)}"


def test_the_paths_of_the_design_page_exist() -> None:
    page = (PACKAGE.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- (`[\w/]+\.py`.*): (`.*`)$", page.partition("## Three paths")[2].partition("\n## ")[0], re.M)
    assert len(lines) > 25
    for files, names in lines:
        for file in re.findall(r"`([\w/.]+)`", files):
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            there = {node.name for node in ast.walk(_parsed(PACKAGE / file)) if isinstance(node, kinds)}
            assert set(re.findall(r"`(\w+)`", names)) <= there, file


def test_no_module_imports_itself_through_others() -> None:
    """Counts imports inside of functions and for types as well."""
    modules = {_module(path) for path in PACKAGE.rglob("*.py")}
    below: dict[str, set[str]] = {module: set() for module in modules}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                below[_module(path)] |= {alias.name for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                below[_module(path)] |= {name if name in modules else str(node.module) for name in names} & modules
    while leaves := [module for module, others in below.items() if not others - {module}]:
        for module in leaves:
            del below[module]
        for others in below.values():
            others.difference_update(leaves)
    assert not below, f"these import each other in a cycle: {sorted(below)}"


# file -> why it may import a module that makes objects of any class out of bytes
PICKLES = {
    "extras/ranks/sharding.py": "reads the metadata of torch's checkpoints, with a list of the names that it may hold",
    "extras/ray/rollout_actor.py": "sends the recipe of a rollout actor, which is the user's code",
}
PICKLING = re.compile(
    r"^\s*(?:from|import)\b.*\b(?:pickle|cloudpickle|dill|shelve|joblib|multiprocessing|ProcessPoolExecutor)\b"
    r"|gather_object|_object_list\b|allow_pickle=True|weights_only=False",
    re.MULTILINE,
)


def test_only_the_named_files_pickle() -> None:
    """Between processes everything is encoded by core/codec.py, or is JSON."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {file for file, text in files.items() if PICKLING.search(text)} <= set(PICKLES)
    for file, reason in PICKLES.items():
        assert file not in files or PICKLING.search(files[file]), f"{file} does not pickle: {reason}"


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_the_core_imports_no_extra() -> None:
    wrong = [each for each in OURS if "extras." in _target(each.module) and not each.package.startswith("extras")]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_extra_imports_another() -> None:
    extras = [
        each for each in OURS if each.package.startswith("extras.") and _target(each.module).startswith("extras.")
    ]
    wrong = [each for each in extras if _target(each.module) != each.package]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.extras
def test_the_table_of_extras_names_what_is_there() -> None:
    folders = {path.parent.name for path in (PACKAGE / "extras").glob("*/__init__.py")}
    assert folders == set(EXTRAS)
    places = [*PROVIDES.values(), *SETTINGS.values(), *(place for _, place, _ in COMMANDS.values())]
    for place in places:
        assert load(place, place) is not None


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_are_imported_only_in_their_folders(library: str) -> None:
    wrong = [f for f in _loading(library) if f.folder not in HEAVY[library].split() and f.file not in ONE_FILE.values()]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("library", ONE_FILE)
def test_library_is_imported_only_in_its_file(library: str) -> None:
    wrong = [each for each in _loading(library) if each.file != ONE_FILE[library]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("library", TERMINAL)
def test_only_the_command_line_writes_to_the_terminal(library: str) -> None:
    wrong = [each for each in ALL if each.module.split(".")[0] == library and not _is_command(each)]
    wrong = [each for each in wrong if each.file != "train/progress.py"]  # progress bars for scripts and notebooks
    assert not wrong, "\n".join(map(str, wrong))


def _is_command(each: Import) -> bool:
    return each.package == "cli" or (
        each.file.startswith("extras/") and each.file.endswith(("command.py", "commands.py"))
    )


def test_algo_knows_no_config() -> None:
    wrong = [each for each in OURS if each.package == "algo" and "config" in each.module]
    assert not wrong, "\n".join(map(str, wrong))


# The loop knows the protocols of policy and learner, and functions that take them.
LOOP_KNOWS = {
    "palestra.learner.base",
    "palestra.policy.base",
}


def test_the_loop_knows_no_concrete_learner_or_policy() -> None:
    seams = ("learner", "policy", "rollout", "engine", "servers", "sources")
    known = {f.module for f in OURS if f.file == "train/loop.py" and _target(f.module) in seams}
    assert known == LOOP_KNOWS


@pytest.mark.parametrize(
    ("code", "most_modules"),
    [
        ("import palestra", IMPORT_MODULES),
        ("from palestra.cli.main import run; assert run(['--help']) == 0", HELP_MODULES),
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
    """An error in a user's file is reported at once, before anything heavy is loaded."""
    code = "import sys, palestra.agent_source as a; a.load_agent_file(None); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _loading(library: str) -> list[Import]:
    return [each for each in ALL if each.module.split(".")[0] == library and each.at_load]
