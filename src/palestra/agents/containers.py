"""Attempts in containers: the arguments of `docker run` or `podman run`, and the removal of a container."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palestra.core.errors import MissingPackageError, UnsupportedError
from palestra.core.http import is_loopback

FOLDER = "/palestra"  # of the attempt, in its container
# What the programs themselves read, to find their service.
ENGINE_VARIABLES = (
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
    *("CONTAINER_HOST", "CONTAINER_SSHKEY", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "DBUS_SESSION_BUS_ADDRESS"),
)
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Containers:
    """An image, and the program that runs it."""

    engine: str  # docker or podman
    image: str

    @classmethod
    def of_image(cls, image: str) -> Containers:
        """The image with the first engine that works; PalestraError with the reason where none does."""
        reasons = []
        for engine in ("docker", "podman"):
            if not (reason := _why_not(engine)):
                return cls(engine, image)
            reasons.append(reason)
        raise MissingPackageError(
            f"--agent-image {image} needs docker or podman: {'; '.join(reasons)}. Install one or start its service, or "
            "run the program without a container by --agent-cmd"
        )

    def command(
        self, command: Sequence[str], name: str, folder: Path, variables: Iterable[str], base_url: str
    ) -> list[str]:
        """Run `command` (empty: the image's own) with the attempt's folder and the named variables.

        Their values are not among the arguments, which every local user can read.
        """
        options = []
        if is_loopback(urlsplit(base_url).hostname or ""):  # only the host's network reaches our loopback address
            if sys.platform != "linux":  # containers run in a virtual machine
                raise UnsupportedError(
                    "containers on this system cannot reach 127.0.0.1; set --agent-host 0.0.0.0 and PALESTRA_TOKEN"
                )
            options.append("--network=host")
        if self.engine == "docker" or shutil.which("catatonit"):  # docker has its own init, podman needs a package
            options.append("--init")
        folder.chmod(0o777)  # the image may have a user of its own; the folder above is ours alone
        return [
            *(self.engine, "run", "--rm", "--interactive", "--name", name, *options),
            *("--volume", f"{folder}:{FOLDER}:Z"),
            *(word for variable in variables for word in ("--env", variable)),
            *(self.image, *command),
        ]

    async def remove(self, name: str) -> None:
        """Remove a container that is still running: killing the client that started it does not stop it."""
        null = subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            self.engine, "rm", "--force", name, stdin=null, stdout=null, stderr=null
        )
        try:
            await asyncio.wait_for(process.wait(), _ANSWER_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _why_not(engine: str) -> str:
    """Reason why an engine cannot be used; empty if it can."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "timeout": _ANSWER_S}
    # not a pipe, which a service that the engine starts would hold open
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run([engine, "version"], stderr=errors, check=False, **options)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{engine} version` failed ({error})"
        errors.seek(0)
        said = errors.read(10_000).decode("utf-8", "replace").strip().splitlines()
    return f"`{engine} version` failed ({said[-1] if said else 'no output'})" if done.returncode else ""
