"""Rollout actors on a Ray cluster: each in its own placement group; weights travel by the object store.

A placement group that finds no room waits, which is also what tells an autoscaler to add a node. The process that
trains is the driver; it samples nothing itself.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from palestra.core.errors import InputError, PalestraError, ServiceError, SettingError, text_of
from palestra.extras.ray.pool import ActorLost, PackedWeights, Recipe
from palestra.extras.ray.rollout_actor import RolloutActor, dumps
from palestra.extras.ray.settings import RaySection

CLIENT = "ray://"
HEAD_S = 10.0  # a head that accepts no connection for this long counts as lost
_PROBE_S = 2.0
_REMEDY = "start a cluster with `ray start --head`, give its address as ray.address, or use --ray.address local"
_LOST = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
    exceptions.WorkerCrashedError,
)
_DRIVER = {
    # Ray would end a driver without a message once the head is away for a minute: the learner may be in a long step
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class RayActor:
    """A rollout actor, seen from the driver."""

    def __init__(self, options: RaySection, recipe: Any, head: tuple[str, int]) -> None:
        self._head = head
        self._has_ended = False
        cpus, gpus = options.cpus_per_actor, options.gpus_per_actor
        self._recipe = recipe
        self._group = placement_group([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}])
        self.handle = (
            ray.remote(RolloutActor)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,  # a new process would have no weights: the pool starts another actor
                max_concurrency=100_000,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
            )
            .remote()
        )

    async def place(self) -> None:
        """Until there is room for it, and its process runs."""
        await self._answer(self.handle.place.remote())

    async def build(self) -> None:
        """Until its model is loaded."""
        await self._answer(self.handle.build.remote(self._recipe))

    async def update(self, shared: Any) -> None:
        await self._answer(self.handle.update.remote(shared))

    async def sample(self, job: bytes) -> bytes | str:
        return await self._answer(self.handle.sample.remote(job))

    def end(self) -> None:
        # If Ray was shut down in between, it would connect again, and wait for minutes for a lost head
        if self._has_ended or not _takes_connections(self._head, _PROBE_S):
            return
        self._has_ended = True
        with suppress(Exception):  # it is gone already
            ray.kill(self.handle)
        with suppress(Exception):
            remove_placement_group(self._group)

    async def _answer(self, reference: Any) -> Any:
        try:
            return await reference
        except _LOST as error:
            raise ActorLost(_first_line(error)) from None
        except exceptions.RayTaskError as error:
            raise cause_of(error) from None


class RayCluster:
    """A connection to a cluster, until the run ends."""

    def __init__(self, options: RaySection) -> None:
        self._options = options
        self._recipe: Any = None
        self._is_ours = not ray.is_initialized()  # a script may have connected before
        if self._is_ours:
            connect(options)
        is_client = options.address.startswith(CLIENT)
        self._head = _host_and_port(options.address if is_client else ray.get_runtime_context().gcs_address)
        self._answered = time.monotonic()

    def launch(self, recipe: Recipe) -> RayActor:
        if self._recipe is None:
            try:
                pickled = dumps(recipe)
            except Exception as error:
                raise InputError(
                    f"the agent or environment cannot be sent to Ray's actors ({type(error).__name__}: {error}). Keep "
                    "locks, connections and open files out of its attributes; open them in the tool, in context_fn or "
                    "in Env.start"
                ) from error
            self._recipe = ray.put(pickled)
        return RayActor(self._options, self._recipe, self._head)

    def share(self, weights: PackedWeights) -> Any:
        if not _takes_connections(self._head, HEAD_S):  # to put anything there would end this process without a message
            raise ServiceError(self._lost())
        return ray.put(weights)

    def update_all(self, actors: Sequence[RayActor], shared: Any, timeout_s: float) -> list[RayActor]:
        """Give the weights to all, and wait without an event loop; returns those that did not take them."""
        if not actors:
            return []
        pending = {actor.handle.update.remote(shared): actor for actor in actors}
        done, late = ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s)
        lost = [pending[reference] for reference in late]
        for reference in done:
            try:
                ray.get(reference)
            except _LOST:
                lost.append(pending[reference])
            except exceptions.RayTaskError as error:
                raise cause_of(error) from None
        return lost

    async def answers(self) -> bool:
        """Whether it does now: while it does not, nothing else may be asked of it."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*self._head), _PROBE_S)
        except (OSError, TimeoutError):
            return False
        writer.close()
        self._answered = time.monotonic()
        return True

    async def failure(self) -> str | None:
        """The reason that the whole cluster is lost; None while it answers."""
        if await self.answers() or time.monotonic() - self._answered < HEAD_S:
            return None
        return self._lost()

    def _lost(self) -> str:
        return f"the head of the Ray cluster at {self._head[0]}:{self._head[1]} does not answer any more"

    def resources(self) -> str:
        found = ray.cluster_resources()
        return f"{found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs"

    def close(self) -> None:
        if self._is_ours and _takes_connections(self._head, _PROBE_S):
            ray.shutdown()
        elif self._is_ours:
            atexit.register(_leave)


def _leave() -> None:
    """End this process, whose run has failed, without Ray's shutdown: without a head it hangs, or crashes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def require_answer(options: RaySection) -> str:
    """The address that the options name; one that takes no connection is an error."""
    address = os.environ.get("RAY_ADDRESS", "auto") if options.address == "auto" else options.address
    limit_s = min(options.timeout_s, HEAD_S)
    if address not in ("auto", "local") and not _takes_connections(_host_and_port(address), limit_s):
        raise ServiceError(f"no Ray cluster answers at {address}; {_REMEDY}")
    return address


def connect(options: RaySection) -> None:
    """Connect to a cluster, or start one; an address that does not answer raises within the time-out."""
    address, timeout_s = require_answer(options), options.timeout_s
    os.environ.update({name: os.environ.get(name, value) for name, value in _DRIVER.items()})
    failures: list[BaseException] = []

    def init(**options: Any) -> None:
        try:
            ray.init(address, logging_level=logging.ERROR, namespace="palestra", **options)
        except BaseException as error:
            failures.append(error)

    if address == "local":
        init(include_dashboard=False)  # its processes end with the thread that started them, so it is this one
    else:  # whatever listens there, a connection to it is given up after the time-out
        thread = threading.Thread(target=init, name="palestra-ray", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            atexit.register(_leave)
            raise ServiceError(
                f"no Ray cluster answered at {address} within {timeout_s:g} s (ray.timeout_s); {_REMEDY}"
            )
    if failures:
        raise ServiceError(f"cannot connect to Ray at {address}: {_first_line(failures[0])}; {_REMEDY}")


def cause_of(error: exceptions.RayTaskError) -> PalestraError:
    """The error of the actor, without Ray's traceback around it."""
    cause = getattr(error, "cause", None) or error
    text = text_of(cause)
    if isinstance(cause, ModuleNotFoundError):
        text += "; every node of the cluster needs the packages that the agent uses, and Palestra of this version"
    return ServiceError(text)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(CLIENT).partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        raise SettingError(f"ray.address = {address!r}; expected auto, local, HOST:PORT or ray://HOST:PORT")
    return host.strip("[]"), int(port)


def _takes_connections(address: tuple[str, int], timeout_s: float) -> bool:
    try:
        socket.create_connection(address, timeout=timeout_s).close()
        return True
    except OSError:
        return False
