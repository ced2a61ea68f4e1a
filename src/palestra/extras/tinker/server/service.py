"""State of the server: base models, sessions, the models that they train, and their samplers."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError, StateError
from palestra.core.files import verify_folder
from palestra.engine.runner import GIB, default_kv_bytes
from palestra.extras.tinker.server import requests as bodies
from palestra.extras.tinker.server.base_model import AdapterSpec, BaseModel
from palestra.extras.tinker.server.checkpoints import (
    KINDS,
    Checkpoint,
    Checkpoints,
    TinkerPath,
    TrainingRun,
    checkpoint_name,
)
from palestra.extras.tinker.server.futures import Gone, NotFound, OrderedWorker, Request, Requests, Result, TooBusy
from palestra.extras.tinker.server.messages import ForwardBackwardRequest, parse_request, write_outputs
from palestra.extras.tinker.server.sampler import ReadWeights, Sampler, SampleRequest
from palestra.extras.tinker.server.training_model import TrainingModel, check_loss
from palestra.servers.web import refuse

log = logging.getLogger("palestra")

RESTARTED = "it has ended, or the server was restarted; continue from a saved tinker:// path"
Json = dict[str, Any]


@dataclass(slots=True)
class Session:
    id: str
    name: str
    metadata: Json
    last_seen: float = field(default_factory=time.monotonic)
    models: dict[int, Request] = field(default_factory=dict)  # by model_seq_id


@dataclass(eq=False, slots=True)
class Model:
    """One training in progress."""

    id: str
    session: str
    base: BaseModel
    spec: AdapterSpec
    bytes: int
    worker: OrderedWorker
    training: tuple[TrainingModel, TrainingRun] | None = None
    pinned: dict[int, ReadWeights] = field(default_factory=dict)  # by version, oldest first
    inflight: dict[int, ReadWeights] = field(default_factory=dict)  # the version that inflight sampling sessions use

    def submit(self, seq_id: int, kind: str, work: Callable[[TrainingModel, TrainingRun], Result]) -> Request:
        """Do this in the turn of its number."""

        def with_training() -> Result:
            if self.training is None:
                raise NotFound(f"the model {self.id!r} could not be made; see what create_model answered")
            return work(*self.training)

        return self.worker.submit(seq_id, kind, with_training, model_id=self.id)


@dataclass(slots=True)
class SamplingSession:
    id: str
    session: str
    base: BaseModel
    spec: AdapterSpec | None
    weights: Callable[[], ReadWeights]  # as they are now; Gone for a version that is not kept any more
    sampler: str  # requests of one name share an engine
    path: str | None = None  # of a checkpoint
    requests: dict[int, Request] = field(default_factory=dict)  # by seq_id


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """How much the server takes on. What is beyond is answered with 429."""

    sessions: int = 64
    models: int = 8
    memory_gib: float | None = None  # of adapters, optimizers and pinned versions together; None: no limit
    samplers: int = 4
    versions: int = 8  # pinned ones of one model that are kept in memory
    session_idle_s: float = 900.0  # without a heartbeat
    session_gone_s: float = 30.0  # … if another client needs its place; the SDK sends one every 10 s
    waiting_samples: int = 4096
    rows_per_pass: int | None = None  # None: 4 on a CPU, as many as fit on a GPU


class Service:
    """Everything behind the HTTP routes. The event loop's thread calls its methods; workers do what takes long.

    What takes the body of a request gives its answer, or the Request whose result is the answer.
    """

    def __init__(self, bases: Sequence[BaseModel], output_dir: Path, limits: ServiceLimits | None = None) -> None:
        self.bases = {base.name: base for base in bases}
        self.limits = limits or ServiceLimits()
        self.requests = Requests()
        self.checkpoints = Checkpoints(output_dir)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self._output_dir = output_dir
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._path_weights: dict[tuple[str, float], ReadWeights] = {}

    # sessions

    def create_session(self, body: bodies.CreateSession) -> Json:
        full = f"{self.limits.sessions} sessions are open, which is the limit; close one, or try again later"
        self._make_room(lambda: full if len(self.sessions) >= self.limits.sessions else "")
        metadata = {**(body.user_metadata or {}), **({"tags": body.tags} if body.tags else {})}
        session = Session(f"s-{secrets.token_hex(6)}", body.display_name or "tinker", metadata)
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, body: bodies.SessionRequest) -> Json:
        self.session(body.session_id)
        return {"type": "session_heartbeat"}

    def session(self, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise Gone(f"the session {session_id!r} does not exist: {RESTARTED}")
        session.last_seen = time.monotonic()
        return session

    def get_session(self, session_id: str) -> Json:
        session = self.session(session_id)
        models = [model.id for model in self._models_of(session_id)]
        samplers = [sampling.id for sampling in self.sampling.values() if sampling.session == session_id]
        return {"training_run_ids": models, "sampler_ids": samplers, "display_name": session.name}

    def finish_session(self, session_id: str, *, completed: bool = True) -> None:
        self.sessions.pop(session_id, None)
        for model in self._models_of(session_id):
            self.unload(model.id, completed=completed)
        self._forget_samplers(lambda sampling: sampling.session == session_id)

    def _forget_samplers(self, has_ended: Callable[[SamplingSession], bool]) -> None:
        for sampling in [each for each in list(self.sampling.values()) if has_ended(each)]:
            self.sampling.pop(sampling.id, None)

    def _models_of(self, session_id: str) -> list[Model]:
        return [model for model in self.models.values() if model.session == session_id]

    def _touch(self, session_id: str) -> None:
        if session := self.sessions.get(session_id):
            session.last_seen = time.monotonic()

    def end_idle(self) -> None:
        """End sessions whose client is gone."""
        longest = time.monotonic() - self.limits.session_idle_s
        for session_id in [s.id for s in self.sessions.values() if s.last_seen < longest]:
            log.warning("session %s has sent nothing for %g s and is ended", session_id, self.limits.session_idle_s)
            self.finish_session(session_id, completed=False)

    def _make_room(self, refusal: Callable[[], str]) -> None:
        """End sessions of disconnected clients while something is refused; the longest silent first, none at work."""
        self.end_idle()
        longest = time.monotonic() - self.limits.session_gone_s
        for session in sorted(self.sessions.values(), key=lambda session: session.last_seen):
            if session.last_seen >= longest or not refusal():
                break
            if not any(model.worker.is_busy for model in self._models_of(session.id)):
                log.warning("session %s has no heartbeat and is ended to make room for another one", session.id)
                self.finish_session(session.id, completed=False)
        if refused := refusal():
            raise TooBusy(refused)

    def close(self) -> None:
        for session_id in list(self.sessions):
            self.finish_session(session_id, completed=False)
        while self._samplers:
            self._samplers.popitem()[1].close(wait_s=1.0)  # a module that is freed while the process exits aborts it

    # training

    def capabilities(self) -> Json:
        models = [
            {"model_name": b.name, "max_context_length": b.context, "trainable": True, "sampleable": True}
            for b in self.bases.values()
        ]
        return {"supported_models": models}

    def base(self, name: str) -> BaseModel:
        path = name.rstrip("/")
        base = self.bases.get(name) or next((each for each in self.bases.values() if path == each.path), None)
        if base is None:
            raise NotFound(f"the base model {name!r} is not served here; this server has {', '.join(self.bases)}")
        return base

    def create_model(self, body: bodies.CreateModel | bodies.CreateFromWeights) -> Request:
        """Make a model to train, a new one or from a checkpoint; the same number again gives the same one."""
        session = self.session(body.session_id)
        if body.model_seq_id in session.models:
            return session.models[body.model_seq_id]
        loads: list[Callable[[TrainingModel], None]] = []
        if isinstance(body, bodies.CreateFromWeights):
            base, saved = self._saved(body.path, body.base_model)
            loads.append(partial(_load, checkpoint=saved, optimizer=body.optimizer))
            spec, seed, kind, more = saved.spec, 0, "load_weights", {"path": body.path}
        else:
            base, lora, kind, more = self.base(body.base_model), body.lora_config, "create_model", {}
            spec, seed = (AdapterSpec(), 0) if lora is None else (lora.spec, lora.seed or 0)
        size = base.trained_bytes(spec)
        self._make_room(lambda: self._refusal(spec, size))
        model_id = body.model_id
        model = Model(model_id, session.id, base, spec, size, OrderedWorker(model_id, self.requests, base.use_stream))
        self.models[model_id] = model
        metadata = {**session.metadata, **(body.user_metadata or {})}
        about = {"model_id": model_id, "session": session.id, "user_metadata": metadata}

        def make() -> Result:
            try:
                rows = self.limits.rows_per_pass or (4 if base.device.type == "cpu" else 1 << 30)
                training_model = TrainingModel(base, spec, seed=seed, rows_per_pass=rows)
                for load in loads:
                    load(training_model)
                run = TrainingRun(self._output_dir, base, spec, session.name, about)
            except BaseException:
                self.models.pop(model_id, None)
                raise
            model.training = training_model, run
            self.checkpoints.add_run(model_id, run.folder)
            return {"type": kind, "model_id": model_id, **more}

        session.models[body.model_seq_id] = model.worker.run(kind, make, model_id=model_id)
        return session.models[body.model_seq_id]

    def _refusal(self, spec: AdapterSpec, size: int) -> str:
        """Reason that a model of `size` bytes cannot be made now; empty if it can."""
        if len(self.models) >= self.limits.models:
            return f"{len(self.models)} models are being trained, which is the limit; try again later"
        held = sum(model.bytes for model in self.models.values())
        if self.limits.memory_gib is None or held + size <= self.limits.memory_gib * GIB:
            return ""
        return (
            f"rank {spec.rank} needs about {size / GIB:.2f} GiB, and of {self.limits.memory_gib:g} GiB "
            f"{held / GIB:.2f} are taken; use a lower rank, or try again later"
        )

    def model(self, model_id: str) -> Model:
        model = self.models.get(model_id)
        if model is None:
            raise NotFound(f"the model {model_id!r} does not exist: {RESTARTED}")
        self._touch(model.session)
        return model

    def get_info(self, body: bodies.ModelRequest) -> Json:
        model = self.model(body.model_id)
        base, rank = model.base, model.spec.rank
        data = {"model_name": base.loadable_name, "tokenizer_id": base.path, "arch": base.architecture}
        lora = {"is_lora": rank > 0, "lora_rank": rank}
        return {"type": "get_info", "model_id": model.id, "model_data": data, "model_name": base.name, **lora}

    def unload(self, model_id: str, *, completed: bool = True) -> Request:
        """End a model's training; what was saved stays."""
        model = self.models.pop(model_id)

        def end() -> Result:
            if model.training is not None:
                model.training[1].close(completed=completed)
            model.training = None
            return {"type": "unload_model", "model_id": model_id}

        request = model.worker.run("unload_model", end)
        model.worker.close(f"the model {model_id!r} has ended before an earlier request came")
        self._forget_samplers(lambda sampling: sampling.sampler == model_id and sampling.path is None)
        return request

    def forward_backward(self, request: ForwardBackwardRequest) -> Request:
        model = self.model(request.model_id)
        settings = check_loss(request.loss_fn, request.loss_fn_config)

        def work(training_model: TrainingModel, run: TrainingRun) -> Result:
            began = time.perf_counter()
            backward = not request.forward_only
            outputs = training_model.forward_backward(request.data, request.loss_fn, settings, backward=backward)
            if backward:
                run.computed(request.data, request.loss_fn, outputs, time.perf_counter() - began)
            return write_outputs(outputs.logprobs, {"loss:sum": outputs.loss})

        return model.submit(request.seq_id, "forward_backward", work)

    def optim_step(self, body: bodies.OptimStep) -> Request:
        adam = body.adam

        def work(training_model: TrainingModel, run: TrainingRun) -> Result:
            began = time.perf_counter()
            norm = training_model.optim_step(adam)
            run.stepped(adam, norm, time.perf_counter() - began)
            return {"type": "optim_step", "metrics": {"grad_norm": norm, "learning_rate": adam.learning_rate}}

        return self.model(body.model_id).submit(body.seq_id, "optim_step", work)

    def refuse(self, body: bytes, reason: str) -> None:
        """The number of a request that is refused counts: the model's later ones must not wait for it."""

        def refused() -> Result:
            raise StateError(reason)

        with contextlib.suppress(PalestraError, ValueError, KeyError, TypeError, RecursionError):
            if body[:1] == b"{":
                fields = json.loads(body)
                model_id, seq_id = str(fields.get("model_id")), int(fields["seq_id"])
            else:
                message = parse_request(body)
                model_id, seq_id = message.model_id, message.seq_id
            if model := self.models.get(model_id):
                model.worker.submit(seq_id, "refused", refused)

    # checkpoints

    def save(self, kind: str, body: bodies.SavedWeights) -> Request:
        model, what = self.model(body.model_id), KINDS[kind][0]
        path = TinkerPath(model.id, kind, checkpoint_name(body.path or f"seq-{body.seq_id:06d}"))
        overwrite = body.overwrite if isinstance(body, bodies.SaveWeights) else True
        about = {"base_model": model.base.name, "spec": asdict(model.spec), "user_metadata": body.user_metadata or None}

        def work(training_model: TrainingModel, run: TrainingRun) -> Result:
            write = partial(training_model.save, optimizer=kind == "weights")
            self.checkpoints.save(path, write, about, ttl_s=body.ttl_seconds, overwrite=overwrite)
            return {"type": what, "path": str(path)}

        return model.submit(body.seq_id, what, work)

    def load(self, body: bodies.LoadWeights | bodies.CreateFromWeights) -> Request:
        if isinstance(body, bodies.CreateFromWeights):
            return self.create_model(body)
        model, path = self.model(body.model_id), TinkerPath.parse(body.path)

        def work(training_model: TrainingModel, run: TrainingRun) -> Result:
            _, saved = self._saved(body.path, model.base.name)
            if saved.spec != model.spec:
                raise NotFound(f"{path} has {saved.spec}, and {model.id!r} was made with {model.spec}; they must agree")
            _load(training_model, saved, body.optimizer)
            return {"type": "load_weights", "path": body.path, "model_id": model.id}

        return model.submit(body.seq_id, "load_weights", work)

    def _saved(self, path: str, base_model: str | None) -> tuple[BaseModel, Checkpoint]:
        """The checkpoint at a path, and the model that it was trained on, or that is named and must be that one."""
        checkpoint = self.checkpoints.find(TinkerPath.parse(path))
        base = self.base(base_model or checkpoint.base_model)
        if checkpoint.base_model != base.name:
            raise NotFound(f"{path} was trained on {checkpoint.base_model}, and this is {base.name}")
        return base, checkpoint

    # sampling

    def save_for_sampler(self, body: bodies.SaveWeightsForSampler) -> Request:
        """A checkpoint or, without a path, a sampling session at the version that the model has in its turn.

        An inflight one moves on to later versions with all others of its model.
        """
        if body.path is not None:
            return self.save("sampler_weights", body)
        model = self.model(body.model_id)
        session, number = self.session(model.session), body.sampling_session_seq_id
        if number is None:
            number = 1_000_000 + body.seq_id
        sampling_id = f"{session.id}:sample:{number}"

        def work(training_model: TrainingModel, run: TrainingRun) -> Result:
            version = training_model.version

            def newest() -> ReadWeights:
                return next(iter(model.inflight.values()))

            def pinned() -> ReadWeights:
                if version not in model.pinned:
                    raise Gone(f"version {version} of {sampling_id!r} is gone; save it under a name to keep it")
                return model.pinned[version]

            # every save of a version has the same copy
            copy = (model.inflight | model.pinned).get(version) or partial(dict, training_model.snapshot())
            if body.kind == "inflight":
                model.inflight = {version: copy}
            else:
                model.pinned = dict([*(model.pinned | {version: copy}).items()][-self.limits.versions :])
            weights = newest if body.kind == "inflight" else pinned
            new = SamplingSession(sampling_id, session.id, model.base, model.spec, weights, model.id)
            self.sampling[sampling_id] = new
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampling_id}

        return model.submit(body.seq_id, "save_weights_for_sampler", work)

    def create_sampling_session(self, body: bodies.CreateSamplingSession) -> Json:
        session = self.session(body.session_id)
        sampling_id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if sampling_id not in self.sampling:
            new = self._sampling_session(body.base_model, body.model_path, sampling_id, session.id)
            self.sampling[sampling_id] = new
        return {"type": "create_sampling_session", "sampling_session_id": sampling_id}

    def _sampling_session(
        self, base_model: str | None, path: str | None, sampling_id: str = "", session_id: str = ""
    ) -> SamplingSession:
        """A sampling session that is not registered yet; without ids for one request that names a model."""
        if path is None:
            base = self.base(base_model or next(iter(self.bases)))
            return SamplingSession(sampling_id, session_id, base, None, lambda: dict, f"base {base.name}")
        base, saved = self._saved(path, base_model)
        # one that was overwritten since is another one
        read = self._path_weights.setdefault((path, saved.created), saved.tensors)
        return SamplingSession(sampling_id, session_id, base, saved.spec, lambda: read, saved.path.run_id, path)

    def sampling_session(self, sampling_id: str) -> SamplingSession:
        session = self.sampling.get(sampling_id)
        if session is None:
            raise NotFound(f"the sampling session {sampling_id!r} does not exist: {RESTARTED}")
        self._touch(session.session)
        session.weights()
        return session

    def get_sampler(self, sampling_id: str) -> Json:
        session = self.sampling_session(sampling_id)
        return {"sampler_id": session.id, "base_model": session.base.loadable_name, "model_path": session.path}

    def sample(self, body: bodies.Sample) -> Request:
        if body.sampling_session_id is not None:
            target = self.sampling_session(body.sampling_session_id)
        else:
            target = self._sampling_session(body.base_model, body.model_path)
        prompt, base = body.prompt.tokens, target.base
        if not 0 < len(prompt) < base.context:
            raise refuse(400, f"the prompt has {len(prompt)} tokens; the model takes 1 to {base.context - 1}")
        if wrong := [token for token in (min(prompt), max(prompt)) if not 0 <= token < base.vocabulary]:
            raise refuse(400, f"token id {wrong[0]} is outside the vocabulary 0..{base.vocabulary - 1}")
        targets = body.target_prompt_logprobs
        turns = body.turns(base.context - len(prompt), base.end_ids)
        asked = SampleRequest(target.weights(), prompt, turns, body, None if targets is None else targets.tensor)
        request = None if body.seq_id is None else target.requests.get(body.seq_id)
        if request is None:
            sampler = self._sampler(target)
            request = self.requests.new("sample")
            if body.seq_id is not None:
                target.requests[body.seq_id] = request
            sampler.submit(asked, request.future)
        request.about["sample_sequence_ids"] = [f"{request.id}:{i}" for i in range(body.num_samples)]
        return request

    def _sampler(self, target: SamplingSession) -> Sampler:
        waiting = sum(sampler.busy for sampler in self._samplers.values())
        if waiting >= self.limits.waiting_samples:
            raise TooBusy(f"{waiting} samples wait already; try again in a moment")
        key = f"{target.sampler} {target.spec}"
        if key not in self._samplers:  # idle samplers of other models are closed to make room
            for other in [name for name, sampler in self._samplers.items() if not sampler.busy]:
                if len(self._samplers) < self.limits.samplers:
                    break
                self._samplers.pop(other).close()
            if len(self._samplers) >= self.limits.samplers:
                raise TooBusy(f"{len(self._samplers)} models are being sampled, which is the limit; try again later")
            device = target.base.device
            memory = default_kv_bytes(device) / GIB / self.limits.samplers if device.type == "cuda" else None
            self._samplers[key] = Sampler(target.base, target.spec, memory)
        self._samplers.move_to_end(key)
        return self._samplers[key]


def _load(training_model: TrainingModel, checkpoint: Checkpoint, optimizer: bool) -> None:
    verify_folder(checkpoint.folder)
    if optimizer and checkpoint.path.kind != "weights":
        raise NotFound(f"{checkpoint.path} was saved for sampling, without the optimizer; load the weights alone")
    training_model.load(checkpoint.folder, optimizer=optimizer)
