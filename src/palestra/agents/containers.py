"""Attempts in containers: the arguments of `docker run` or `podman run`, and the removal of a container."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    is_rootless: bool = False  # podman of an ordinary user

    @classmethod
    def of_image(cls, image: str) -> Containers:
        """The image with the first engine that works; PalestraError with the reason where none does."""
        reasons = []
        for engine in ("docker", "podman"):
            if shutil.which(engine) is None:
                reasons.append(f"{engine} is not installed")
            elif (done := _ask(engine, "version")).returncode:
                lines = done.stderr.strip().splitlines() or ["no output"]
                reasons.append(f"`{engine} version` failed ({lines[-1]})")
            else:
                rootless = _ask(engine, "info", "--format", "{{.Host.Security.Rootless}}")  # an error of docker
                return cls(engine, image, rootless.stdout.strip() == "true")
        raise MissingPackageError(
            f"--agent-image {image} needs docker or podman: {'; '.join(reasons)}. Install one or start its service, or "
            "run the program without a container by --agent-cmd"
        )

    def gateway_host(self) -> str:
        """The address for a gateway that containers reach, while they reach nothing else on our loopback address."""
        if self.is_rootless and sys.platform == "linux":
            return "127.0.0.1"  # `command` hands its ports on
        inspect = ("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")  # of docker
        host = _ask(self.engine, *inspect).stdout.strip() if sys.platform == "linux" else ""
        try:
            socket.create_server((host or "?", 0)).close()
            return host
        except OSError:  # podman as root, or containers of a virtual machine, another namespace or another machine
            raise UnsupportedError(
                "containers of this system reach no address that is theirs alone; set --agent-host to one that they "
                "reach, such as 0.0.0.0, and PALESTRA_TOKEN"
            ) from None

    def command(
        self, command: Sequence[str], name: str, folder: Path, variables: Iterable[str], base_urls: Sequence[str]
    ) -> list[str]:
        """Run `command` (empty: the image's own) with the attempt's folder and the named variables.

        Their values are not among the arguments, which every local user can read.
        """
        ports = {url.port for url in map(urlsplit, base_urls) if is_loopback(url.hostname or "")}
        options = [f"--network=pasta:{','.join(f'-T,{port}' for port in sorted(map(str, ports)))}"] if ports else []
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


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an engine. One that cannot be run has failed, with the reason as its error output."""
    # not pipes, which a service that the engine starts would hold open
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        null = subprocess.DEVNULL
        try:
            done = subprocess.run(command, stdin=null, stdout=out, stderr=errors, timeout=_ANSWER_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, -1, "", str(error))
        texts = [os.pread(file.fileno(), 10_000, 0).decode("utf-8", "replace") for file in (out, errors)]
    return subprocess.CompletedProcess(command, done.returncode, *texts)
