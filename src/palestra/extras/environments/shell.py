"""Tasks among files, done with shell commands in a sandbox."""

from __future__ import annotations

import random
from typing import Any

from palestra.core.types import Score
from palestra.envs.env import Env
from palestra.envs.sandbox import SandboxLimits
from palestra.envs.sandbox.config import MAX_SANDBOXES, SandboxConfig
from palestra.evals.measures import fail_reason, pass_reason
from palestra.extras.environments.calculator import is_number

_WORDS = "amber birch cedar dune ember fjord grove heath islet jetty knoll ledge marsh north ocean".split()
_LIMITS = SandboxLimits(seconds=5.0, memory_mib=256, processes=16, output_bytes=4000)


class Shell(Env):
    """Find things out about files, and change them, with shell commands."""

    name = "shell"
    env_config_cls = SandboxConfig
    max_episodes = MAX_SANDBOXES
    instructions = "You work on a computer with a shell. Use it to do what you are asked, then answer."

    def setup(self) -> None:
        self.config.check()

    def make_problem(self, rng: random.Random) -> Any:
        files = {
            f"{folder}/{name}.txt": "".join(
                f"{' '.join(rng.choices(_WORDS, k=4))}\n" for _ in range(rng.randint(3, 12))
            )
            for folder, name in zip(("logs", "notes", "data"), rng.sample(_WORDS, 3), strict=True)
        }
        word, path = rng.choice(_WORDS), rng.choice(sorted(files))
        lines = [line for text in files.values() for line in text.splitlines()]
        match rng.randrange(3):
            case 0:
                question = f"How many lines in all files below this folder have the word {word}?"
                return {"input": question, "expect": sum(word in line.split() for line in lines), "files": files}
            case 1:
                question = f"How many lines does the file {path} have?"
                return {"input": question, "expect": len(files[path].splitlines()), "files": files}
            case _:
                target = f"{rng.choice(_WORDS)}.out"
                question = f"Write the lines of {path}, sorted, without doubles, into the file {target}."
                expect = "".join(f"{line}\n" for line in sorted(set(files[path].splitlines())))
                return {"input": question, "expect": expect, "files": files, "target": target, "source": path}

    def start(self) -> None:
        self.sandbox = self.config.sandbox(_LIMITS)
        for name, text in self.problem.row["files"].items():
            self.sandbox.write(name, text)

    def shell(self, command: str) -> str:
        """Run a shell command, and give its output.

        Args:
            command: One line for sh, such as ls -R.
        """
        ran = self.sandbox.run(["sh", "-c", command])
        note = f"[stopped: {ran.stopped}]" if ran.stopped else f"[exit {ran.exit_code}]" if ran.exit_code else ""
        return ran.output + note

    def score(self, answer: str) -> Score:
        expect = self.problem.expect
        if isinstance(expect, int):
            return is_number(answer, expect)
        target = self.problem.row["target"]
        written = self.sandbox.read(target)
        if written is None:
            return fail_reason(f"there is no file {target}")
        return pass_reason(f"{target} is right") if written == expect else fail_reason(f"{target} has other lines")

    def close(self) -> None:
        self.sandbox.close()
