"""What user code can do wrong, in every place that runs it: its attempt fails, and the run goes on.

`python tests/faults/test_user_code.py` writes all of it as a table.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import select
import signal
import sqlite3
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from builders import wait_until

from palestra import Context, Env, EnvConfig, EvalSuite, measure
from palestra.agents.agent import Agent
from palestra.agents.tools.tool import function_tool
from palestra.cli import main as cli_main
from palestra.core import calls, time_limit
from palestra.core.codec import CodecError
from palestra.core.config import RunConfig
from palestra.core.errors import UserCodeError
from palestra.core.types import Message, SamplingParams, ToolCall
from palestra.env_api import train_env
from palestra.envs import env, running, suite_env
from palestra.envs.running import RunningEnv
from palestra.rollout import agent_loop, rewards
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.collect import AgentLoop, Collector, RemoteCollector
from palestra.rollout.rewards import RewardFunctions
from palestra.rollout.workers import RolloutWorkers

LIMIT_S = 0.3
HANG_S = 20.0
SIZE = 2  # attempts in a group
RELEASED = threading.Event()  # ends the calls that hang
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="rollout.workers forks processes")


leave = os._exit  # `palestra` replaces it


class OwnBase(BaseException):
    """As the panics of Rust extensions."""


class BadText(Exception):
    def __str__(self):
        raise OwnBase("no text")


class BadRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def raising(error):
    def act():
        raise error

    return act


def exiting(code):
    return lambda: sys.exit(code)


async def cancelled():
    task = asyncio.create_task(asyncio.sleep(30))
    await asyncio.sleep(0)
    task.cancel()
    await task


def cancelled_in_a_loop():
    coroutine = cancelled()
    try:
        asyncio.run(coroutine)
    finally:
        coroutine.close()


def cancel_this_task():
    asyncio.current_task().cancel()


def alarmed():
    def ring(number, frame):
        raise OwnBase("time is up")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def exit_a_fork():
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def cyclic():
    values = []
    values.append(values)
    return values


def deep(count=5000):
    value = []
    for _ in range(count):
        value = [value]
    return value


def recursive():
    return recursive()


KINDS = {
    "pytest.fail": lambda: pytest.fail("not in stock"),
    "CancelledError": raising(asyncio.CancelledError()),
    "GeneratorExit": raising(GeneratorExit("end")),
    "SystemExit": exiting(0),
    "SystemExit(bad text)": lambda: sys.exit(BadText()),
    "KeyboardInterrupt": raising(KeyboardInterrupt("by hand")),
    "own BaseException": raising(OwnBase("panic")),
    "text that raises": raising(BadText()),
    "ExceptionGroup": raising(ExceptionGroup("two", [ValueError("a"), BadText()])),
    "BaseExceptionGroup": raising(BaseExceptionGroup("two", [OwnBase("a"), SystemExit(3)])),
    "StopIteration": raising(StopIteration(1)),
    "StopAsyncIteration": raising(StopAsyncIteration()),
    "RecursionError": recursive,
    "MemoryError": raising(MemoryError()),
    "AssertionError": raising(AssertionError("no")),
    "TimeoutError": raising(TimeoutError()),
    "cancelled asyncio.run": cancelled_in_a_loop,
    "cancels its task": cancel_this_task,
    "signal.setitimer": alarmed,
    "fork and os._exit": exit_a_fork,
    "sleeps": RELEASED.wait,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "None": lambda: None,
    "cyclic": cyclic,
    "deep": deep,
    "lambda": lambda: lambda: 1,
    "generator": lambda: (KINDS["pytest.fail"]() for _ in range(2)),
    "sleeping generator": lambda: (RELEASED.wait() for _ in range(2)),
    "lock": threading.Lock,
    "bytes": lambda: b"\xff",
    "bad repr": BadRepr,
    "10^400": lambda: 10**400,
    "str": lambda: "\x00",
}
ENDING: dict[str, Any] = {"segfault": lambda: ctypes.string_at(0), "os._exit(0)": lambda: os._exit(0)}
WELL = "well"  # of the problem at which nothing goes wrong
ALL = [*KINDS, *ENDING, WELL]
QUICK = ("pytest.fail", "CancelledError", "SystemExit", "text that raises", "cancels its task", "BaseExceptionGroup")
ENV_HOOKS = (
    "tool", "async tool", "make_problem", "start", "step", "score", "async score", "score_group", "score_turns",
    "close", "state_key",
)  # fmt: skip
SUITE_HOOKS = ("measure", "async measure", "group measure", "context_fn", "reward function")
HOOKS = (*ENV_HOOKS, *SUITE_HOOKS)


def do(here: str, hook: str, kind: str) -> Any:
    """Misbehave if this place is the one that does."""
    return (KINDS | ENDING)[kind]() if here == hook and kind != WELL else None


class Items:
    """Problems, one of each kind."""

    def __init__(self, hook):
        self.hook = hook

    def __len__(self):
        return len(ALL)

    def __getitem__(self, index):
        kind = ALL[index]
        if self.hook == "make_problem":
            made = do("make_problem", self.hook, kind)
            if made is not None:
                return made
        return {"input": "Look it up.", "kind": kind}


def environment_of(hook: str) -> Any:
    if hook in SUITE_HOOKS:
        return suite_of(hook)

    class Hostile(Env):
        @property
        def kind(self):
            return self.problem.row.get("kind", "None")

        def problems(self, split):
            return Items(hook)

        def start(self):
            return do("start", hook, self.kind)

        def look(self) -> Any:
            """Look it up."""
            return do("tool", hook, self.kind)

        async def look_slowly(self) -> Any:
            """Look it up."""
            return do("async tool", hook, self.kind)

        def step(self, answer):
            return do("step", hook, self.kind)

        def score(self, answer):
            return do("score", hook, self.kind) if hook == "score" else 1.0

        def close(self):
            do("close", hook, self.kind)

    methods: dict[str, Any] = {}
    if hook == "score_group":
        methods["score_group"] = lambda self, attempts: do("score_group", hook, attempts[0].kind)
    if hook == "score_turns":
        methods["score_turns"] = lambda self: do("score_turns", hook, self.kind)
    if hook == "state_key":
        methods["state_key"] = lambda self: do("state_key", hook, self.kind)
    if hook == "async score":

        async def score(self, answer):
            return do("async score", hook, self.kind)

        methods["score"] = score
    return RunningEnv(type("Hostile", (Hostile,), methods)())


def suite_of(hook: str) -> Any:
    @function_tool
    def look() -> str:
        """Look it up."""
        return "1"

    def judged(ctx):
        return do("measure", hook, ctx.case.row["kind"]) if hook == "measure" else 1.0

    async def judged_slowly(ctx):
        return do("async measure", hook, ctx.case.row["kind"]) if hook == "async measure" else 1.0

    measures = [measure(judged), measure(judged_slowly)]
    if hook == "group measure":
        measures.append(measure(group=True)(lambda contexts: do("group measure", hook, contexts[0].case.row["kind"])))
    records = [{"input": "Look it up.", "kind": kind} for kind in ALL]
    context_fn = (lambda row: do("context_fn", hook, row["kind"])) if hook == "context_fn" else None
    suite = EvalSuite.from_records(records, measures=measures, context_fn=context_fn)
    return suite_env.SuiteEnvironment(Agent("hostile", tools=[look]), suite)


class Speaker:
    """Calls all tools, then answers."""

    turns: tuple[Any, ...] = ()
    sampled_tokens = 0
    shows_call_ids = True

    def __init__(self, episode):
        self._calls = tuple(ToolCall(f"call{i}", tool.name, {}) for i, tool in enumerate(episode.tools))

    def length_with(self, replies):
        return 0

    async def generate(self, sampling):
        self.sampled_tokens += 1
        asked, self._calls = self._calls, ()
        return Message("assistant", "" if asked else "Done.", tool_calls=asked), "stop"

    def append_replies(self, messages): ...

    def restart(self, messages): ...

    def close(self): ...


class Run:
    """Groups of an environment whose hook misbehaves, collected in this process or in a worker."""

    def __init__(self, hook: str, workers: int) -> None:
        self.environment = environment_of(hook)
        self.problems = self.environment.problems("train")
        self.runner = asyncio.Runner()
        self._hook, self._workers = hook, None
        self.collector: Any = self._collector()
        if workers:
            policy: Any = SimpleNamespace(version=0, expect=lambda turns: None)
            self._workers = RolloutWorkers(lambda policy: dict.fromkeys((True, False), self._collector()), 1, 0)
            self._workers.start(policy)
            self.collector = RemoteCollector(self._workers, True, lambda size: 8)
        self.collect(WELL)

    def _collector(self) -> Collector:
        functions = [self._reward] if self._hook == "reward function" else []
        limits = AttemptLimits(SamplingParams(max_new_tokens=8), max_tool_rounds=1, tool_timeout_s=LIMIT_S)
        start: Any = lambda episodes: [Speaker(episode) for episode in episodes]  # noqa: E731
        return Collector(self.environment, AgentLoop(limits, start), RewardFunctions(functions))

    def _reward(self, completions, kind, **columns):
        return [1.0] * len(kind) if kind[0] == WELL else do("reward function", self._hook, kind[0])

    def collect(self, kind: str) -> str:
        """What came of the attempts at the problem of this kind."""
        problem = self.problems[ALL.index(kind)]

        async def collected() -> Any:
            async with asyncio.timeout(HANG_S):
                return await self.collector.collect([problem], SIZE, ["seed"])

        [group] = self.runner.run(collected())
        assert len(group.rollouts) == SIZE
        return outcome(group.rollouts[0])

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        calls._hung_in_workers = 0  # they have ended
        RELEASED.set()
        RELEASED.clear()
        self.runner.close()


def outcome(rollout: Any) -> str:
    """In a word or two, and the text."""
    failed_call = next((result.content for result in rollout.tool_results if not result.ok), None)
    failed_score = next((score.reason for score in rollout.scores.values() if score.error), None)
    if failed_score is not None:
        return f"no verdict: {failed_score}"
    if rollout.error is not None:
        return f"attempt failed: {rollout.error}"
    return "no effect" if failed_call is None else f"call failed: {failed_call}"


def shorten_limits(patch: Any) -> None:
    for module, name in (
        (running, "STEP_TIMEOUT_S"), (agent_loop, "STEP_TIMEOUT_S"), (suite_env, "MEASURE_TIMEOUT_S"),
        (rewards, "REWARD_TIMEOUT_S"), (running, "CLOSE_LIMIT_S"), (env, "MAKE_LIMIT_S"),
        (time_limit, "BLOCKED_S"), (running, "NAMED_AFTER_S"),
    ):  # fmt: skip
        patch(module, name, LIMIT_S)
    patch(running.Opener.open, "__defaults__", (LIMIT_S,))


def ends_the_process(hook: str, kind: str, workers: int) -> bool:
    """As Ctrl-C does, in the main thread: problems are made there, and async code runs there without workers."""
    return kind == "KeyboardInterrupt" and (hook == "make_problem" or (hook.startswith("async") and not workers))


@pytest.fixture
def short_limits(monkeypatch):
    shorten_limits(monkeypatch.setattr)


def attempts(hook: str, workers: int, names: Any) -> dict[str, str]:
    """What came of each kind of misbehaviour in a place; at the end the run still works."""
    run = Run(hook, workers)
    try:
        found = {kind: run.collect(kind) for kind in names if not ends_the_process(hook, kind, workers)}
        run.collect(WELL)
        return found
    finally:
        run.close()


RAISES = {"pytest.fail": "Failed: not in stock", "SystemExit": "SystemExit: 0", "CancelledError": "CancelledError"}


@linux_only
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hook", HOOKS)
def test_user_code_that_raises_anything_fails_no_more_than_its_attempts(hook, workers, short_limits):
    found = attempts(hook, workers, QUICK)
    for kind, text in RAISES.items():
        if hook == "close":
            assert found[kind] == "no effect"
        else:
            assert text in found[kind], found


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hook", HOOKS)
def test_no_misbehaviour_of_user_code_ends_or_stops_the_run(hook, workers, short_limits):
    found = attempts(hook, workers, KINDS)
    assert len(found) >= len(KINDS) - 1
    assert hook == "close" or found["sleeps"] != "no effect"


@linux_only
def test_a_problem_that_cannot_be_sent_to_a_worker_fails_that_call_alone(short_limits):
    run = Run("tool", 1)
    try:
        run.problems = [replace(run.problems[0], row={"function": lambda: 1}), *run.problems[1:]]
        with pytest.raises(CodecError, match=r"row\['function'\] is a function, which cannot be sent"):
            run.collect(next(iter(KINDS)))
        assert run.collect(WELL) == "no effect"
    finally:
        run.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("KeyboardInterrupt", "sleeps")])
def test_a_setup_that_misbehaves_is_reported_with_its_name(kind):
    env = type("Hostile", (Env,), {"setup": lambda self: KINDS[kind]()})
    error = None
    try:
        RunningEnv(env())
    except UserCodeError as raised:
        error = str(raised)
    assert error is None or error.startswith("Hostile.setup raised")


@linux_only
def test_a_setup_that_does_not_return_is_named():
    assert "Hostile.setup has not returned for 0.3 s" in child_that("setup", "sleeps", 0, ends_with="not returned")[1]


def collect(environment: Any, *problems: int, tools: bool = True, tool_timeout_s: float = 30.0) -> list[Any]:
    """Groups of an environment, whose tools are all called at once."""
    chosen = [environment.problems("train")[i] for i in problems]
    limits = AttemptLimits(SamplingParams(max_new_tokens=8), max_tool_rounds=2, tool_timeout_s=tool_timeout_s)
    collector = Collector(environment, AgentLoop(limits, lambda episodes: [Speaker(e) for e in episodes]))

    async def collected() -> list[Any]:
        async with asyncio.timeout(60):
            return await collector.collect(chosen, SIZE, [str(i) for i in problems])

    return asyncio.run(collected())


def errors(groups: list[Any]) -> set[str | None]:
    failed = {result.content for g in groups for r in g.rollouts for result in r.tool_results if not result.ok}
    return {r.error for g in groups for r in g.rollouts} | failed


def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table calls (name text)")
    return connection


def insert(connection: sqlite3.Connection, name: str) -> str:
    time.sleep(0.05)  # longer than the event loop blocks for a call
    connection.execute("insert into calls values (?)", [name])
    return name


def count_calls(connection: sqlite3.Connection) -> int:
    return connection.execute("select count(*) from calls").fetchone()[0]


def test_a_connection_made_in_context_fn_works_in_slow_tools_and_in_measures() -> None:
    @function_tool
    def first(context: Context[sqlite3.Connection]) -> str:
        """Look it up."""
        return insert(context, "first")

    @function_tool
    def second(context: Context[sqlite3.Connection]) -> str:
        """Look it up again."""
        return insert(context, "second")

    suite = EvalSuite.from_records(
        [{"input": "a"}, {"input": "b"}],
        measures=[measure("calls")(lambda ctx: count_calls(ctx.context) == 2)],
        context_fn=lambda row: database(),
    )
    groups = collect(suite_env.SuiteEnvironment(Agent("clerk", tools=[first, second]), suite), 0, 1)
    assert errors(groups) == {None}
    assert [r.scores["calls"].value for g in groups for r in g.rollouts] == [1.0] * 4


class Ledger(Env):
    """Keeps a connection, and notes the thread of each call."""

    closed: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.notes: dict[str, list[int]] = {"calls": []}

    def problems(self, split: Any) -> Any:
        return ["a", "b"]

    def start(self) -> None:
        self.connection = database()
        self.note()

    def note(self) -> None:
        """Note the thread."""
        self.threads.append(threading.get_ident())
        self.notes["calls"].append(count_calls(self.connection))

    def tools(self) -> Any:
        return [self.first, self.second]

    def first(self) -> str:
        """Look it up."""
        self.note()
        return insert(self.connection, "first")

    def second(self) -> str:
        """Look it up again."""
        self.note()
        return insert(self.connection, "second")

    def step(self, answer: str) -> None:
        self.note()

    def state_key(self) -> int:
        self.note()
        return count_calls(self.connection)

    def score(self, answer: str) -> float:
        self.note()
        return float(len(set(self.threads)) == 1 and self.notes["calls"] == [0, 0, 0, 1, 2, 2, 2])

    def close(self) -> None:
        self.connection.close()
        self.closed.append(threading.get_ident() == self.threads[0])


def test_a_connection_made_in_start_works_in_all_hooks_and_siblings_share_no_lists() -> None:
    Ledger.closed.clear()
    groups = collect(RunningEnv(Ledger()), 0, 1)
    assert errors(groups) == {None}
    assert [r.reward for g in groups for r in g.rollouts] == [1.0] * 4
    assert Ledger.closed == [True] * 4


def test_a_state_key_that_blocks_does_not_stop_other_rollouts() -> None:
    tool_ran = threading.Event()

    class Waits(Env):
        def problems(self, split: Any) -> Any:
            return ["waits", "goes on"]

        def state_key(self) -> bool:
            return self.problem.input != "waits" or tool_ran.wait(30)

        def look(self) -> str:
            """Look it up."""
            if self.problem.input == "goes on":
                tool_ran.set()
            return "1"

        def score(self, answer: str) -> float:
            return 1.0

    groups = collect(RunningEnv(Waits()), 0, 1)
    assert errors(groups) == {None}
    assert {state for g in groups for r in g.rollouts for state in r.states} == {"True"}


def test_a_close_that_takes_long_is_logged_and_keeps_the_group(monkeypatch, caplog) -> None:
    monkeypatch.setattr(running, "CLOSE_LIMIT_S", 0.05)
    may_close, closed = threading.Event(), []

    class Slow(Ledger):
        def close(self) -> None:
            may_close.wait(30)
            closed.append(self.problem.input)

    try:
        groups = collect(RunningEnv(Slow()), 0, 1)
        assert (errors(groups), closed) == ({None}, [])
        assert "closing an attempt took longer than 0.05 s; it continues in the background" in caplog.text
    finally:
        may_close.set()
    wait_until(lambda: sorted(closed) == ["a", "a", "b", "b"])


def test_what_a_half_opened_group_has_opened_is_closed_in_its_thread() -> None:
    threads: dict[str, list[int]] = {"opened": [], "closed": []}
    both = threading.Barrier(SIZE)

    class Half(Env):
        def problems(self, split: Any) -> Any:
            return ["a"]

        def close(self) -> None:
            threads["closed"].append(threading.get_ident())

    class HalfOpened(RunningEnv):
        def open(self, problem: Any) -> Any:
            if both.wait(30) == 0:
                raise OwnBase("no room")
            threads["opened"].append(threading.get_ident())
            return super().open(problem)

    assert errors(collect(HalfOpened(Half()), 0)) == {"opening an episode raised OwnBase: no room"}
    assert len(threads["opened"]) == SIZE - 1
    assert threads["opened"] == threads["closed"] != [threading.get_ident()]


def test_a_slow_tool_of_an_attempt_with_state_ends_it_and_its_siblings_go_on(short_limits) -> None:
    class Hangs(Env):
        def problems(self, split: Any) -> Any:
            return ["hangs", "goes on"]

        def look(self) -> str:
            """Look it up."""
            if self.problem.input == "hangs":
                RELEASED.wait(30)
            return "1"

        def score(self, answer: str) -> float:
            return 1.0

    hanging, other = collect(RunningEnv(Hangs()), 0, 1, tool_timeout_s=LIMIT_S)
    RELEASED.set()
    RELEASED.clear()
    assert errors([hanging]) == {"look took longer than 0.3 s"}
    assert errors([other]) == {None}


def test_tools_without_state_that_are_called_in_one_turn_run_at_once() -> None:
    both = threading.Barrier(2 * SIZE)

    @function_tool
    def first() -> int:
        """Look it up."""
        return both.wait(30) * 0

    @function_tool
    def second() -> int:
        """Look it up again."""
        return both.wait(30) * 0

    suite = EvalSuite.from_records([{"input": "a"}], measures=[measure("good")(lambda ctx: 1.0)])
    assert errors(collect(suite_env.SuiteEnvironment(Agent("clerk", tools=[first, second]), suite), 0)) == {None}


class Alarmed(Env):
    """Sends a signal to the training when it scores the first attempt, in a thread or on the event loop, and waits."""

    number: int = 0

    def make_problem(self, rng: Any) -> Any:
        return f"What does a red lamp cost? {rng.randint(1, 10**6)}"

    def score(self, answer: str) -> float:
        os.kill(os.getpid(), self.number)
        time.sleep(600)
        return 1.0


class AlarmedOnTheLoop(Alarmed):
    async def score(self, answer: str) -> float:  # type: ignore[override]
        signal.raise_signal(self.number)
        await asyncio.sleep(600)
        return 1.0


def fail_by_pytest(number: int, frame: Any) -> None:
    pytest.fail("Timeout >1.0s")


def time_is_up(number: int, frame: Any) -> None:
    raise TimeoutError("time is up")


@linux_only
@pytest.mark.parametrize("cls", [Alarmed, AlarmedOnTheLoop])
@pytest.mark.parametrize(
    ("handler", "ends_with"),
    [
        (None, "KeyboardInterrupt: "),
        (time_is_up, "TimeoutError: time is up"),
        (fail_by_pytest, "Failed: Timeout >1.0s"),
    ],
    ids=["Ctrl-C", "signal.alarm", "pytest-timeout"],
)
def test_what_a_signal_raises_ends_the_training(handler, ends_with, cls, tmp_path) -> None:
    env = cls(EnvConfig(train_size=4, held_out_size=2))
    env.number = signal.SIGALRM if handler else signal.SIGINT
    settings = {
        "output_dir": str(tmp_path),
        "train": {"max_steps": 1, "problems_per_step": 2},
        "rollout": {"group_size": 2, "max_new_tokens": 8},
    }

    def train() -> str:
        if handler:
            signal.signal(signal.SIGALRM, handler)
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            train_env(RunningEnv(env), RunConfig.build(settings))
        except BaseException as error:
            is_ctrl_c = isinstance(error, KeyboardInterrupt)
            return f"KeyboardInterrupt: {error}" if is_ctrl_c else f"{type(error).__name__}: {error}"
        return "trained"

    code, text = in_a_child(lambda: print(train()), within_s=120.0)
    assert code == 0, text
    assert text.splitlines()[-1].startswith(ends_with)


def in_a_child(run: Any, within_s: float, ends_with: str = "") -> tuple[int | None, str]:
    """The exit code and the output of a fork that calls `run`; None: it did not end within the limit."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)  # whatever earlier tests have set
        logging.getLogger("palestra").setLevel(logging.NOTSET)
        logging.getLogger("palestra").propagate, logging.getLogger("palestra").handlers = True, []
        code = 99
        try:
            run()
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        leave(code)
    os.close(write)
    text, until = b"", time.monotonic() + within_s
    while time.monotonic() < until and not (ends_with and ends_with in text.decode()):
        if select.select([read], [], [], 0.1)[0]:
            if not (chunk := os.read(read, 1 << 16)):
                break
            text += chunk
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None, text.decode()
    os.close(read)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()


def child_that(hook: str, kind: str, workers: int, ends_with: str = "") -> tuple[int | None, str]:
    """The exit code and the output of the command's process in which user code misbehaves; None: it did not end."""

    def run() -> None:
        cli_main.cli.main = lambda **_: print(misbehave(hook, kind, workers))
        cli_main.main()
        leave(99)

    return in_a_child(run, HANG_S, ends_with)


def misbehave(hook: str, kind: str, workers: int) -> str:
    shorten_limits(setattr)
    if hook == "setup":
        RunningEnv(type("Hostile", (Env,), {"setup": lambda self: (KINDS | ENDING)[kind]()})())
        return "no effect"
    return Run(hook, workers).collect(kind)


LEGEND = """\
A: the attempt fails with the text. C: the call fails. V: no verdict. –: no effect. E: the process ends with one
sentence and an exit code other than 0; of a segfault, with the code that crashed. S: a sentence before the run.
N: a warning names it after a while, here and until it returns. Left of the slash without workers, right of it with one.
HANGS, ENDS: must not be.

"""


def table() -> str:
    """The outcomes as Markdown."""
    ending = {
        (hook, kind, workers): end_cell(hook, kind, workers)
        for workers in (0, 1)
        for hook in (*HOOKS, "setup")
        for kind in (*KINDS, *ENDING)
        if kind in ENDING or ends_the_process(hook, kind, workers) or (hook, kind) == ("setup", "sleeps")
    }  # first: a process with threads is not to fork
    shorten_limits(setattr)
    cells = {(hook, workers): cells_of(hook, workers) for hook in HOOKS for workers in (0, 1)}
    lines = [f"| | {' | '.join((*HOOKS, 'setup'))} |", "| --- |" + " --- |" * (len(HOOKS) + 1)]
    for kind in (*KINDS, *ENDING):
        row = [
            "/".join(ending.get((hook, kind, workers)) or cells[hook, workers][kind] for workers in (0, 1))
            for hook in HOOKS
        ]
        lines.append(f"| {kind} | {' | '.join((*row, ending.get(('setup', kind, 0)) or setup_cell(kind)))} |")
    return LEGEND + "\n".join(lines) + "\n"


def end_cell(hook: str, kind: str, workers: int) -> str:
    """Of what may end the process."""
    is_named = (hook, kind) == ("setup", "sleeps")
    code, text = child_that(hook, kind, workers, ends_with="not returned" if is_named else "")
    print(f"{hook} {workers} {kind}: exit code {code}, {text[:200]!r}", file=sys.stderr, flush=True)
    if is_named:
        return "N" if "not returned" in text else "HANGS"
    if code is None:
        return "HANGS"
    said = [line for line in text.splitlines() if line.startswith(("Error: ", "Stopped."))]
    is_told = len(said) == 1 or (not said and "Fatal Python error: " in text)
    return "–" if text.startswith("no effect") else "E" if code and is_told and "Traceback" not in text else "ENDS"


def cells_of(hook: str, workers: int) -> dict[str, str]:
    run, cells = Run(hook, workers), {}
    for kind in KINDS:
        if ends_the_process(hook, kind, workers):
            continue
        began = time.perf_counter()
        faulthandler.dump_traceback_later(3 * HANG_S, exit=True)
        try:
            text = run.collect(kind)
            cells[kind] = {"attempt": "A", "call": "C", "no verdict": "V", "no effect": "–"}[
                next(w for w in ("attempt", "call", "no verdict", "no effect") if text.startswith(w))
            ]
        except BaseException as error:
            text = f"{type(error).__name__}"
            cells[kind] = "HANGS" if isinstance(error, TimeoutError) else "ENDS"
            run.close()
            run = Run(hook, workers)
        print(
            f"{hook} {workers} {kind}: {text[:150]!r} {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
        )
    run.close()
    faulthandler.cancel_dump_traceback_later()
    return cells


def setup_cell(kind: str) -> str:
    try:
        RunningEnv(type("Hostile", (Env,), {"setup": lambda self: KINDS[kind]()})())
    except UserCodeError:
        return "S"
    except BaseException:
        return "ENDS"
    return "–"


if __name__ == "__main__":
    print(table())
    sys.stdout.flush()
    os._exit(0)
