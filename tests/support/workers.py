"""`pytest --workers N`: N processes, forked when all tests are collected, each taking one file's tests after the other.

Importing torch, transformers, the SDKs and the test modules takes most of a minute, which happens once here. Tests that
are marked `serial` run when all others have ended, one after the other. A worker that dies fails the test that it was
at, and a new one goes on with the rest of its file.
"""

import atexit
import os
import signal
import struct
import time
import traceback
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

NUMBER = struct.Struct("i")
END_WITHIN_S = 20.0


class Queue:
    """Numbers that any process may take, each once: reading a few bytes of a pipe is atomic."""

    def __init__(self, count: int) -> None:
        self.reader, writer = os.pipe()
        for number in range(count):
            os.write(writer, NUMBER.pack(number))
        os.close(writer)

    def take(self) -> int | None:
        data = os.read(self.reader, NUMBER.size)
        return NUMBER.unpack(data)[0] if data else None


@dataclass
class Worker:
    pid: int
    connection: Connection
    items: list[pytest.Item] = field(default_factory=list)  # taken and not finished; the first is the one under way


class Workers:
    """The parent's view: forks, reports, and what is left of a worker that died."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.config = session, session.config
        self.serial = [item for item in session.items if item.get_closest_marker("serial")]
        parallel = [item for item in session.items if not item.get_closest_marker("serial")]
        self.files = [list(items) for _, items in groupby(parallel, lambda item: item.path)]
        self.queue = Queue(len(self.files))
        self.running: dict[Connection, Worker] = {}

    def run(self, count: int) -> None:
        try:
            for _ in range(min(count, len(self.files))):
                self.start([])
            self.wait_for_all()
            self.start(self.serial)
            self.wait_for_all()
        finally:
            self.end()

    def wait_for_all(self) -> None:
        while self.running:
            for connection in wait(list(self.running)):
                self.receive(self.running[connection])  # type: ignore[index]
            if self.session.shouldfail:
                raise self.session.Failed(self.session.shouldfail)

    def start(self, items: list[pytest.Item]) -> None:
        """A worker that begins with these tests."""
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self.running):
                connection.close()
            work(self.session, items, self.files, self.queue, theirs)
        theirs.close()
        self.running[ours] = Worker(pid, ours, items)

    def receive(self, worker: Worker) -> None:
        hook = self.config.hook
        try:
            kind, data = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            kind, data = "end", None
        if kind == "end":
            self.ended(worker)
        elif kind == "file":
            worker.items += self.files[data]
        elif kind == "start":
            hook.pytest_runtest_logstart(nodeid=data.nodeid, location=data.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            hook.pytest_runtest_logfinish(nodeid=data.nodeid, location=data.location)
            del worker.items[0]
        elif kind == "warning":
            # not through the hook, which tells a warning again to every plugin that is registered later
            self.config.pluginmanager.getplugin("terminalreporter").pytest_warning_recorded(**data)

    def ended(self, worker: Worker) -> None:
        del self.running[worker.connection]
        _, status = os.waitpid(worker.pid, 0)
        if worker.items:
            item, *rest = worker.items
            message = f"the process that ran it ended with status {os.waitstatus_to_exitcode(status)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
            self.config.hook.pytest_runtest_logreport(report=report)
            self.start(rest)

    def end(self) -> None:
        """Workers that are still at it, after an interruption or a failure with -x."""
        for worker in self.running.values():
            os.kill(worker.pid, signal.SIGINT)
        until = time.monotonic() + END_WITHIN_S
        for worker in self.running.values():
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.05)


class Sender:
    """Hooks that tell the parent what happens in a worker."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection
        self.warnings_of_collection = True

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.connection.send(("start", SimpleNamespace(nodeid=nodeid, location=location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.connection.send(("finish", SimpleNamespace(nodeid=nodeid, location=location)))

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        if self.warnings_of_collection:  # the parent has had those
            return
        known = {name: getattr(warning_message, name) for name in ("category", "filename", "lineno", "line")}
        message = SimpleNamespace(message=str(warning_message.message), source=None, **known)
        self.connection.send(("warning", {"warning_message": message, "nodeid": nodeid}))


def work(
    session: pytest.Session, items: list[pytest.Item], files: list[list[pytest.Item]], queue: Queue, parent: Connection
) -> NoReturn:
    """What a worker does from its fork to its end."""
    config, status = session.config, 1
    try:
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
        if capture := config.pluginmanager.getplugin("capturemanager"):  # the files of the parent's are shared
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        sender = Sender(config, parent)
        config.pluginmanager.register(sender)
        sender.warnings_of_collection = False
        items = list(items)
        while items or (items := take_file(files, queue, parent)):
            item = items.pop(0)
            items = items or take_file(files, queue, parent)  # fixtures that the next one needs, too, are kept
            config.hook.pytest_runtest_protocol(item=item, nextitem=items[0] if items else None)
        parent.send(("end", None))
        status = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    except Exception:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(END_WITHIN_S))  # nothing that a test left behind holds up the end
        atexit._run_exitfuncs()
        os._exit(status)


def take_file(files: list[list[pytest.Item]], queue: Queue, parent: Connection) -> list[pytest.Item]:
    number = queue.take()
    if number is None:
        return []
    parent.send(("file", number))
    return list(files[number])


def run_in_workers(session: pytest.Session, count: int) -> bool | None:
    """For `pytest_runtestloop`: None leaves the tests to pytest's own."""
    options = session.config.option
    if count < 2 or options.collectonly or options.usepdb or session.testsfailed or not session.items:
        return None
    Workers(session).run(count)
    return True
