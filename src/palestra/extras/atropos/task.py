"""The trainer's side: train on groups that environments in other programs post.

They sample from the model that is served here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError, ServiceError, UnsupportedError, UserCodeError
from palestra.core.files import read_from
from palestra.core.run_folder import RunFolder, RunKind
from palestra.core.types import Group, SamplingParams
from palestra.extras.atropos.protocol import UNUSED, ModelLimits, WireClient, read_group
from palestra.models.loading import LoadedModel
from palestra.policy.local import LocalPolicy
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.inference import completer_of, inference_app
from palestra.servers.web import Server, Tally, open_port, url_of
from palestra.train.evaluation import Evaluator
from palestra.train.group_source import GroupSource
from palestra.train.tasks import OWN_LOOP, EnvironmentTask, Parts

_POLL_S = 0.2
_EMPTY_BATCHES = 8  # in a row with nothing to train, after which going on is pointless
_SHUTDOWN_S = 20.0
WAIT_LIMIT_S = 60.0
_FIRST_NOTE_S = 30.0
_LOOK_EVERY_S = 2.0
_REFUSALS = 3  # posts or requests, after which the next ones will hardly fare better
_REPEATS = 8  # of the same message in the environment's log
# Number of limits to wait. A log may repeat a message for each bad answer while good groups still follow.
_NEVER, _SURE, _LIKELY, _IDLE = 0, 1, 2, 5
_DROPPED_GROUPS = 64  # sampled, more than any environment attempts at a time, and none of them posted
_MAX_LOG_BYTES, _LOG_TAIL_BYTES = 16 * 2**20, 2**20
_TROUBLE = re.compile(r"error|exception|fail|skipp|refus|invalid|too long|cannot|not support", re.IGNORECASE)
_FRAME = re.compile(r"File |raise |During handling|The above exception|Traceback")
_NO_CONNECTION = re.compile(r"ClientConnector|ConnectError|APIConnectionError|Connection (refused|error)", re.I)
_REMEDIES = {
    "Scores are the same": "--env.ensure_scores_are_not_same false posts groups with equal scores, too",
    "Token length is too long": "raise --env.max_token_length",
}


@dataclass(slots=True)
class StallWatch:
    """Checks for stalls while waiting for a batch. `status` asks the trajectory API, `inference` counts requests."""

    status: Callable[[], Awaitable[Mapping[str, Any]]]
    inference: Tally
    requests: RequestWatch
    log: Path  # of the environment; there is no such file where it runs on another machine
    note: Callable[[str], None]
    limit_s: float = WAIT_LIMIT_S  # 0: wait for ever
    clock: Callable[[], float] = time.monotonic
    _began: float = 0.0
    _looked: float = 0.0
    _next_note_s: float = _FIRST_NOTE_S
    _environments: int = 0
    _before: Mapping[str, int] = field(default_factory=dict)  # counts when the wait began

    def begin(self) -> None:
        self._before = {}
        shorten_log(self.log)

    async def check(self) -> None:
        """Log why no group arrives; raise if that has been an error for longer than the limit."""
        now = self.clock()
        if self._before and now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        status = await self.status()
        shorten_log(self.log)
        counts = {
            "accepted": int(status.get("groups_accepted", status.get("queue_size", 0))),
            "posts": int(status.get("posts_refused", 0)),
            "answered": self.inference.answered,
            "refused": self.inference.refused,
            "sampled": self.requests.groups,
            "log": self.log.stat().st_size if self.log.is_file() else 0,
        }
        is_new = int(status.get("environments", 0)) > self._environments  # loading its libraries may take minutes
        self._environments = int(status.get("environments", 0))
        if is_new or counts["accepted"] != self._before.get("accepted"):
            self._began, self._before, self._next_note_s = now, counts, _FIRST_NOTE_S
            return
        waited_s = now - self._began
        if waited_s < min(self._next_note_s, self.limit_s or _FIRST_NOTE_S):
            return
        reason, limits = self._reason(status, {name: count - self._before[name] for name, count in counts.items()})
        text = f"no group for {waited_s:.0f} s: {reason}"
        if limits and self.limit_s and waited_s >= limits * self.limit_s:
            raise ServiceError(f"{text}. Fix this, or wait longer with --wait-limit SECONDS (0: for ever)")
        if waited_s >= self._next_note_s:
            self._next_note_s = 2 * waited_s
            self.note(text)

    def _reason(self, status: Mapping[str, Any], new: Mapping[str, int]) -> tuple[str, int]:
        """The likely reason, and after how many limits to stop."""
        if status.get("environments") == 0:
            return "no environment has registered at the trajectory API; is one running?", _NEVER
        posts, refused, answered, sampled = (new[name] for name in ("posts", "refused", "answered", "sampled"))
        # the text since the last group, of a long one the end; all of it where the file was shortened since
        text = read_from(self.log, self._before["log"])[0][-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
        repeats, line = repeated_trouble(text)
        is_idle = not (answered or refused or posts or self.inference.running)
        parts = [f"{answered} requests to the model were answered"]
        if is_idle and _NO_CONNECTION.search(line):
            parts.append("the environment cannot connect to it; does it ask at another address than --openai.base_url?")
        elif is_idle:
            parts.append("the environment asks for nothing; are its prompts longer than --env.max_token_length?")
        if sampled >= _DROPPED_GROUPS:
            parts.append(
                f"{sampled} whole groups were sampled and none was posted, so the environment drops them itself"
            )
        if posts:
            parts.append(f"{posts} posts were refused, the last because {status.get('last_refusal')}")
        if refused:
            parts.append(f"{refused} requests to the model were refused, the last because {self.inference.reason}")
        remedies = [remedy for text, remedy in _REMEDIES.items() if text in line]
        if repeats > 1:
            parts += [f"the environment's log says {repeats} times: {line}", *remedies]
        if self.log.is_file():
            parts.append(f"see {self.log}")
        is_refused = posts >= _REFUSALS or (refused >= _REFUSALS and refused > answered)
        is_repeated = repeats >= _REPEATS
        if is_refused or sampled >= _DROPPED_GROUPS or (is_repeated and (remedies or not answered)):
            return "; ".join(parts), _SURE
        return "; ".join(parts), _LIKELY if is_repeated else _IDLE if is_idle else _NEVER


def repeated_trouble(text: str) -> tuple[int, str]:
    """The message of trouble that a log repeats most, and how often; numbers and what stands around it may differ.

    >>> repeated_trouble("starting\\nKeyError: 3\\n  File x, line 2\\nKeyError: 4\\n")
    (2, 'KeyError: 4')
    >>> repeated_trouble("task: gcd | score 0.0 (all failed)\\ntask: lcm | score 0.1 (all failed)\\n")
    (2, 'task: lcm | score 0.1 (all failed)')
    """
    counts: Counter[str] = Counter()
    last: dict[str, str] = {}
    for line in map(str.strip, text.splitlines()):
        if _TROUBLE.search(line) and not _FRAME.match(line):
            part = next((part for part in re.split(r"[:|] ", line) if _TROUBLE.search(part)), line)
            kind = re.sub(r"\d+", "0", part)[:200]
            counts[kind] += 1
            last[kind] = line[:300]
    kind, count = max(counts.items(), key=itemgetter(1), default=("", 0))
    return count, last.get(kind, "")


def shorten_log(path: Path) -> None:
    """Keep the end of a log that has grown too large. Its writer opened it for appending, and continues after that."""
    if path.is_file() and (size := path.stat().st_size) > _MAX_LOG_BYTES:
        tail = read_from(path, size - _LOG_TAIL_BYTES, _LOG_TAIL_BYTES)[0]
        path.write_bytes(b"(earlier lines were left out)\n" + tail)


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which the model is served to the environments."""

    host: str = "127.0.0.1"
    port: int = 9001
    token: str | None = None


@dataclass(frozen=True, slots=True)
class WireTask:
    """Groups come from a trajectory API. `scored_by` is the environment, if it is ours: it evaluates the model."""

    client: WireClient
    address: Address
    loaded: LoadedModel
    folder: RunFolder
    scored_by: EnvironmentTask | None = None
    served: Callable[[str, Any], None] = lambda url, tokenizer: None  # called with the inference URL
    wait_limit_s: float = WAIT_LIMIT_S  # without a group, while the environment fails
    kind: RunKind = "wire"
    problem_count: int | None = None

    def source(self, parts: Parts) -> WireSource:
        config = parts.config
        config.refuse(
            ["rollout.constrain_tool_calls", "rollout.unexpected_call_format", *OWN_LOOP],
            "environments over the wire use their own sampling settings",
        )
        config.refuse(["train.expert_routing"], "the wire has no column for experts")
        choice = ["train.sampling", "train.sampling_half_life"]
        config.refuse(choice, "environments over the wire choose their problems")
        policy, note = parts.policy, parts.watcher.note
        if not config.rollout.max_staleness:
            note(
                "groups of any age are trained: rollout.max_staleness = 0 is no limit over the wire; "
                "1 or more leaves older ones out"
            )
        if not isinstance(policy, LocalPolicy) and policy.context_tokens is None:
            raise UnsupportedError(
                "serving a model while it is trained needs the paged engine in this process; "
                "set model.engine to auto or paged, backend to local, and use a model that it supports"
            )
        completer = completer_of(self.loaded, policy, policy.context_tokens)
        assert completer.vocabulary is not None
        completer.on_request = requests = RequestWatch(config.rollout.temperature, note)
        serving = Serving(completer, self.address, parts.runner)
        parts.runner.run(self.client.register(config, parts.step, completer.context_tokens, self.folder))
        serving.start()  # answers when the runner runs next: a resumed run has loaded its weights by then
        self.served(serving.url, parts.tokenizer)
        log = self.folder.log_file("env")
        return WireSource(
            self.client,
            ModelLimits(completer.vocabulary, completer.context_tokens),
            serving,
            note,
            StallWatch(lambda: self.client.call("/status"), serving.tally, requests, log, note, self.wait_limit_s),
            keeps_batches=config.checkpoint.every > 0,
            step=parts.step,
            reward_weights={} if self.scored_by is None else self.scored_by.environment.reward_weights,
            echo=config.echo.coefficient > 0,
            max_staleness=config.rollout.max_staleness or None,  # over the wire 0 is no limit
        )

    def evaluator(self, parts: Parts) -> Evaluator | None:
        if self.scored_by is not None:
            return self.scored_by.evaluator(parts)
        if every := parts.config.eval.every:
            parts.watcher.note(f"eval.every = {every} has no effect: these environments do their own evaluations")
        return None


@dataclass(slots=True)
class WireSource(GroupSource):
    """Batches of the trajectory API, in the order of their numbers.

    The inference server runs in the runner's event loop, so it answers while groups are waited for and pauses
    during a step: no request samples from half-changed weights.
    """

    client: WireClient
    limits: ModelLimits
    serving: Serving
    note: Callable[[str], None]
    stalls: StallWatch
    keeps_batches: bool  # at the API, until they are in a checkpoint
    batch: int = 0  # the number of the last one
    saved: int = 0
    step: int = 0  # how many batches had something to train: environments end by it
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    echo: bool = False  # tool results are learned, too
    max_staleness: int | None = None
    _noted: set[str] = field(default_factory=set)
    _last_error: str = ""

    async def next(self, count: int, version: int) -> list[Group]:
        for _ in range(_EMPTY_BATCHES):
            self.stalls.begin()
            saved = self.saved if self.keeps_batches else None
            while isinstance(delivery := await self.client.batch(self.batch, saved, self.step), str):
                self._note_once("no batch", delivery)
                await self.stalls.check()
                await asyncio.sleep(_POLL_S)
            number, rows = delivery
            if self.step and number > self.batch + 1:
                missing = f"{self.batch + 1}" if number == self.batch + 2 else f"{self.batch + 1} to {number - 1}"
                self.note(f"batch {missing} was set aside by the trajectory API: this run ended on it again and again")
            self.batch = number
            if groups := self._read(rows, version):
                self.step += 1
                return groups
        raise UserCodeError(f"{_EMPTY_BATCHES} batches in a row held nothing to train; last: {self._last_error}")

    def _note_once(self, subject: str, text: str) -> None:
        if text and subject not in self._noted:
            self._noted.add(subject)
            self.note(text)

    def _read(self, rows: Sequence[Mapping[str, Any]], version: int) -> list[Group]:
        """The groups that can be trained; a bad one is left out, with a note."""
        groups: list[Group] = []
        for name in sorted({name for columns in rows for name in UNUSED if columns.get(name)}):
            self._note_once(name, f"environments post {name}, which this trainer does not use (docs/wire.md)")
        if self.echo and not any(columns.get("turns") for columns in rows):
            self.echo = False
            self.note("echo.coefficient has no effect: these environments do not say which tokens are tool results")
        for i, columns in enumerate(rows):
            name = f"batch-{self.batch}/{i}"
            try:
                # groups without `versions` count as one version old, so that their logprobs are used
                groups.append(read_group(columns, name, self.limits, version - 1))
            except (PalestraError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
                self._last_error = str(error)
                self.note(f"{name} from environment {columns.get('env_id')} cannot be trained: {error}")
        return groups

    def state(self) -> dict[str, Any]:
        return {"cursor": self.batch}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.batch = self.saved = int(state.get("cursor", 0))

    def commit(self) -> None:
        self.saved = self.batch

    def close(self) -> None:
        self.serving.close()


class Serving:
    """The inference server as a task of the runner's loop: it answers whenever the runner runs something."""

    def __init__(self, completer: Completer, address: Address, runner: asyncio.Runner) -> None:
        self._socket = open_port(address.host, address.port, address.token)
        self.url = url_of(self._socket)
        self._runner = runner
        app = inference_app(completer, token=address.token)
        self.tally: Tally = app.state.tally
        self._server = Server(app, grace_s=0)  # at the end of the run, running requests are not needed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._runner.get_loop().create_task(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            self._runner.run(asyncio.wait_for(self._task, _SHUTDOWN_S))


@dataclass(slots=True)
class RequestWatch:
    """Counts requests for whole groups, and notes the first at another temperature than the learner's: their logprobs
    would not agree."""

    temperature: float
    note: Callable[[str], None]
    groups: int = 0
    is_noted: bool = False

    def __call__(self, choices: int, params: SamplingParams) -> None:
        self.groups += choices > 1
        if (other := params.temperature) != self.temperature and not self.is_noted:
            self.is_noted = True
            self.note(
                f"an environment samples at temperature {other:g}, the learner scores at {self.temperature:g}; "
                f"if it is for training, set --rollout.temperature {other:g}"
            )
