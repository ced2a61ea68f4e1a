"""`make test-foreign`: train unmodified environments of other projects for three steps each, and write docs/foreign.md.

Each runs by the one documented command, and must train its three steps or end by itself with a reason. The projects
are cloned, or taken from --sources, and installed into virtual environments of their own below --work; nothing of them
becomes part of Palestra. What cannot be set up is skipped, and named with the reason at the end.
Datasets of the hub are replaced by local stand-ins (scripts/foreign_data.py).
What is left of a command after its limit ends by SIGTERM, as by Ctrl-C, so that no process of it stays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from palestra.core import children
from palestra.core.errors import PalestraError
from palestra.extras.atropos.atropos import ensure_python, venv_folder

sys.path.insert(0, str(Path(__file__).parent))
from foreign_data import warm_model, write_data

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "foreign.md"
SOURCES = {  # folder -> repository and tag or branch
    "atropos": ("https://github.com/NousResearch/atropos", "main"),
    "verifiers0": ("https://github.com/PrimeIntellect-ai/verifiers", "v0.1.14"),
    "verifiers1": ("https://github.com/PrimeIntellect-ai/verifiers", "main"),
    "openenv": ("https://github.com/meta-pytorch/OpenEnv", "main"),
}
PACKAGES = {
    "verifiers0": ["verifiers==0.1.14"],
    "verifiers1": ["verifiers==0.4.0"],
    "openenv": ["openenv-core==0.3.0"],
}
SMALL = (
    "--model.name palestra/tiny --train.max_steps 3 --train.problems_per_step 2 --rollout.group_size 4"
    " --rollout.max_new_tokens 48 --eval.cases 2"
)
# Groups of equal scores are posted, too: an untrained model mostly fails, and a step without a gradient is a step.
POSTS_ALL = "--env.ensure_scores_are_not_same false"
GAMES = "game_environments/gymnasium"
ATROPOS = [  # {warm}: palestra/tiny after demonstrations of guesses, for scores that differ
    f"gsm8k_server.py --env.max_token_length 64 {POSTS_ALL} --model.name {{warm}}",
    f"gsm8k_server_axolotl.py --env.max_token_length 64 {POSTS_ALL} --model.name {{warm}}",
    f"community/cat_behavior_env/catbot_arena.py --env.max_token_length 64 {POSTS_ALL} --model.name {{warm}}",
    f"mcqa_thinking_env.py --env.max_token_length 64 {POSTS_ALL} --model.name {{warm}}",
    f"community/goofy_math/goofy_math_server.py --env.max_token_length 64 {POSTS_ALL} --model.name {{warm}}",
    f"community/accessibility_env/accessibility_env.py --with beautifulsoup4 --with lxml"
    f" --env.dataset_path {{data}}/accessibility.jsonl {POSTS_ALL}",
    f"community/humor_generation/humor_env.py --env.data_path humor.jsonl --env.max_token_length 64 {POSTS_ALL}",
    f"infinimath/infinimath_env.py --with mathgenerator --env.max_token_length 256 {POSTS_ALL}",
    f"community/metric_card_generator/metric_card_generator.py --env.max_token_length 256 {POSTS_ALL}",
    f"community/word_hunt/word_hunt_env.py --env.max_token_length 256 {POSTS_ALL}",
    f"{GAMES}/blackjack/blackjack_env_no_thinking.py --with gymnasium==1.0.0 --env.max_token_length 512"
    f" --env.max_episode_turns 2 {POSTS_ALL}",
    f"{GAMES}/blackjack/blackjack_env_thinking.py --with gymnasium==1.0.0 --env.max_token_length 256 {POSTS_ALL}",
    f"{GAMES}/gym_taxi.py --with gymnasium==1.0.0 --env.max_token_length 1024 {POSTS_ALL}",
    "community/regex_generation/regex_env.py --env.max_token_length 16",
    "community/selcube/rubiks_cube_environment.py --with matplotlib --env.max_token_length 256",
    "reasoning_gym_environment/reasoning_gym_environment.py --with reasoning-gym --env.max_token_length 512",
]
MIN_TRAINED = 8  # of Atropos' environments
SKIPPED = "skipped, since it could not be set up: "
VERIFIERS = {
    "verifiers0": ["tool_test", "reasoning_gym_env", "hello_group_reward_v1", "hello_subagent_v1", "wordle"],
    "verifiers1": ["interception", "scratchpad", "code_golf", "color_codeword", "glossary"],
}
OPENENV = ["echo_env", "grid_world_env", "maze_env"]
PALESTRA = ["-c", "from palestra.cli.main import main; main()"]
FIXED = {"COLUMNS": "2000", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
LIMIT_S, STOP_S = 600.0, 60.0
_STEP = re.compile(r"step (\d+)/3 +reward +\S+ \((\S+) to (\S+)\)")


@dataclass(frozen=True)
class Outcome:
    kind: str
    name: str
    result: str
    seconds: float
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    @property
    def row(self) -> str:
        return f"| {self.kind} | {self.name} | {self.result} | {self.seconds:.0f} | {self.load:.1f} | {self.date} |"


class Workshop:
    """Where the projects are cloned and installed."""

    def __init__(self, folder: Path, sources: Path | None = None) -> None:
        self.folder, self.sources = folder, sources

    def source(self, name: str) -> Path:
        """The project's source tree; cloned unless --sources was given."""
        url, ref = SOURCES[name]
        if self.sources is not None:
            path = self.sources / name
            if not path.is_dir():
                raise FileNotFoundError(f"{path} is missing; put {ref} of {url} there")
            return path
        path = self.folder / "src" / name
        if not path.exists():
            _setup("git", "clone", "-q", "--depth", "1", "-b", ref, url, path)
        return path

    def python(self, name: str) -> str:
        """A venv with the project's own packages first, and then ours."""
        folder = self.folder / "venvs" / name
        python = folder / "bin" / "python"
        ready = folder / "ready"
        if not ready.exists():
            _setup(sys.executable, "-m", "venv", folder)
            _setup(python, "-m", "pip", "install", "-q", *PACKAGES[name])
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "zz_palestra.pth").write_text(f"{ROOT / 'src'}\n" + "\n".join(_site_packages()) + "\n")
            ready.touch()
        return str(python)

    def prepare_atropos(self) -> dict[str, str]:
        """Make the venv of all environments, their data and the warm model. Returns their places."""
        os.environ["PALESTRA_CACHE"] = str(self.folder / "cache")
        packages = sorted({package for name in ATROPOS for package in re.findall(r"--with (\S+)", name)})
        ensure_python(venv_folder(packages), packages, print)
        data, warm = self.folder / "data", self.folder / "warm"
        for folder in (data, warm):
            folder.mkdir(parents=True, exist_ok=True)
        write_data(data)
        return {"data": str(data), "warm": str(warm_model(warm, [sys.executable, *PALESTRA], os.environ | FIXED))}


def _setup(*command: str | Path) -> None:
    """Run a command that sets something up; OSError with its last line if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise OSError(f"`{' '.join(map(str, command[:4]))} …` failed: {lines[-1]}")


def _site_packages() -> list[str]:
    """Of this interpreter, and of those that its own venv borrows from."""
    own = sysconfig.get_paths()["purelib"]
    return [own, *(path for path in sys.path if path.endswith("site-packages") and path != own)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "foreign")
    parser.add_argument(
        "--sources", type=Path, help=f"folder with the source trees {', '.join(SOURCES)}; they are not cloned then"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", default="", help="names that contain this; the page keeps the rows of the others")
    arguments = parser.parse_args()
    shop = Workshop(arguments.work.resolve(), arguments.sources and arguments.sources.resolve())
    outcomes = []
    for kind, name in _all():
        if arguments.only not in f"{kind} {name}":
            continue
        outcome = _try(shop, kind, name)
        print(outcome.row, flush=True)
        outcomes.append(outcome)
        _write(arguments.page, outcomes)
    for outcome in outcomes:
        if outcome.result.startswith(SKIPPED):
            print(f"{outcome.kind} {outcome.name}: {outcome.result}")
    if problems := _problems(outcomes, is_all=not arguments.only):
        sys.exit("\n".join(problems))


def _problems(outcomes: Sequence[Outcome], *, is_all: bool) -> list[str]:
    """Reasons this run is no success: environments without an end of their own, or too few that trained."""
    good = ("trained", "ended: ", SKIPPED)
    bad = [outcome for outcome in outcomes if not outcome.result.startswith(good)]
    problems = [f"{outcome.kind} {outcome.name}: {outcome.result}" for outcome in bad]
    trained = sum(outcome.kind == "atropos" and outcome.result.startswith("trained") for outcome in outcomes)
    if is_all and trained < MIN_TRAINED:
        problems.append(f"{trained} environments of Atropos trained; expected at least {MIN_TRAINED}")
    return problems


def _all() -> Iterator[tuple[str, str]]:
    yield from (("atropos", name) for name in ATROPOS)
    yield from ((kind, name) for kind, names in VERIFIERS.items() for name in names)
    yield from (("openenv", name) for name in OPENENV)


def _try(shop: Workshop, kind: str, name: str) -> Outcome:
    try:
        source = shop.source(kind)
        if kind == "atropos":
            places = shop.prepare_atropos()
            command = f"env run-atropos {source}/environments/{name.format(**places)} {_small(name)} --wait-limit 15"
            return _run(kind, name, sys.executable, command, {}, Path(places["data"]))
        if kind == "openenv":
            with _served(shop.python(kind), source, name) as url:
                return _run(kind, name, sys.executable, f"train --env openenv:{url} {SMALL}", {}, shop.folder)
        paths = {"PYTHONPATH": str(source / "environments" / name)}
        return _run(kind, name, shop.python(kind), f"train --env verifiers:{name} {SMALL}", paths, shop.folder)
    except (subprocess.SubprocessError, OSError, PalestraError) as error:
        return Outcome(kind, name, f"{SKIPPED}{_cell(' '.join(str(error).split()))}", 0.0)


def _small(name: str) -> str:
    return SMALL.replace("--model.name palestra/tiny ", "") if "--model.name" in name else SMALL


def _run(kind: str, name: str, python: str, words: str, environ: dict[str, str], cwd: Path) -> Outcome:
    """`trained 3 steps`, or the reason for which the command ended."""
    command = [python, *PALESTRA, *shlex.split(words)]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = children.start(
            command, cwd=cwd, env={**os.environ, **FIXED, **environ}, stdout=output, stderr=subprocess.STDOUT
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        seconds, code = time.monotonic() - began, process.poll()
        children.end(process, STOP_S)
        output.seek(0)
        return Outcome(kind, name, _result(code, output.read()), seconds)


def _result(code: int | None, output: str) -> str:
    if code is None:
        return f"**neither trained nor ended within {LIMIT_S:.0f} s**"
    steps = _STEP.findall(output)
    if code == 0 and steps and steps[-1][0] == "3":
        rewards = [float(reward) for step in steps for reward in step[1:]]
        return f"trained 3 steps, rewards from {min(rewards):g} to {max(rewards):g}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    first = max((i for i, line in enumerate(lines) if line.startswith("Error:")), default=None)
    if first is None:
        return f"**ended without a reason** (status {code}): {_cell((lines or ['no output'])[-1])}"
    return f"ended: {_cell(' '.join(lines[first:]))}"


def _cell(text: str) -> str:
    text = re.sub(r"(?<![\w`:/])/\S*/(?=\S)", "…/", text.removeprefix("Error: "))
    return (text if len(text) < 400 else text[:400] + " …").replace("|", "\\|")


@contextmanager
def _served(python: str, source: Path, name: str) -> Iterator[str]:
    """An OpenEnv server as its project starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "uvicorn", f"{name}.server.app:app", "--port", str(port), "--log-level", "warning"]
    server = children.start(command, cwd=source / "envs", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        children.end(server, 5.0)


def _write(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the page: the rows of `outcomes`, and for all others the row that the page has."""
    known = [line for line in page.read_text().splitlines() if line.startswith("| ")] if page.is_file() else []
    rows = {tuple(line.split(" | ")[:2]): line for line in [*known, *(outcome.row for outcome in outcomes)]}
    names = [(f"| {kind}", name) for kind, name in _all()]
    versions = ", ".join(f"{name} {' '.join(packages)}" for name, packages in PACKAGES.items())
    page.write_text(
        "# Environments that we did not write\n\n"
        "Written by `make test-foreign` (scripts/foreign.py): each was run unmodified, by the one documented\n"
        "command, on a CPU with `palestra/tiny`. It should train three steps, or end by itself with the reason.\n"
        "That model knows two small tasks and nothing else, so rewards here say nothing about the environments.\n"
        "Datasets of the hub are small local stand-ins (scripts/foreign_data.py). `{warm}` is `palestra/tiny` after\n"
        "demonstrations of guesses, for environments that drop groups with equal scores; `{data}` is the folder of\n"
        "the stand-ins, in which the commands run.\n\n"
        f"Versions: atroposlib 0.4.0, {versions}. Options of all: `{SMALL}`; of run-atropos also `--wait-limit 15`.\n"
        f"The load is that of the machine at the end of the run, on {os.cpu_count()} cores; above one a core, all\n"
        "takes longer, and a wait of 15 s may end before a slow group arrives.\n\n"
        "| project | environment | result | seconds | load | date |\n| --- | --- | --- | ---: | ---: | --- |\n"
        + "".join(f"{rows[name]}\n" for name in names if name in rows)
    )


if __name__ == "__main__":
    main()
