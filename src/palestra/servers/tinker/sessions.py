"""What a client has open: its session, the models that it trains, and the versions that it samples from."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from palestra.servers.tinker.base_model import AdapterSpec, BaseModel
from palestra.servers.tinker.futures import NotFound, OrderedWorker, Request
from palestra.servers.tinker.sampler import PinnedWeights
from palestra.servers.tinker.training_model import TrainingModel
from palestra.servers.tinker.training_run import TrainingRun


@dataclass(slots=True)
class Session:
    id: str
    name: str
    metadata: dict[str, Any] = field(default_factory=dict)
    last_seen: float = field(default_factory=time.monotonic)
    models: dict[int, Request] = field(default_factory=dict)  # by model_seq_id
    sampling: dict[int, str] = field(default_factory=dict)  # by sampling_session_seq_id


@dataclass(eq=False, slots=True)
class Model:
    """One training in progress."""

    id: str
    session: str
    base: BaseModel
    spec: AdapterSpec
    bytes: int
    worker: OrderedWorker
    run: TrainingRun | None = None
    training_model: TrainingModel | None = None
    pinned: OrderedDict[int, PinnedWeights] = field(default_factory=OrderedDict)  # by version, oldest first

    @property
    def ready(self) -> tuple[TrainingModel, TrainingRun]:
        if self.training_model is None or self.run is None:
            raise NotFound(f"the model {self.id!r} could not be made; see what create_model answered")
        return self.training_model, self.run


@dataclass(slots=True)
class SamplingSession:
    id: str
    session: str
    base: BaseModel
    spec: AdapterSpec | None
    weights: PinnedWeights
    sampler: str  # requests of one name share an engine
    path: str | None = None
    requests: dict[int, Request] = field(default_factory=dict)  # by seq_id
    version: int | None = None  # of a model under training, where it was not saved
