"""The processes of `--nproc`: with programs of a few lines in place of a training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError, SettingError
from palestra.core.ranks import RankVariables, is_first_rank, refuse_ranks
from palestra.extras.ranks import launch

LAUNCH = "import sys; from palestra.extras.ranks.launch import launch_ranks; raise SystemExit(launch_ranks"


def run(code: str, count: int = 2) -> int:
    return launch.launch_ranks(
        [sys.executable, "-c", f"import os, sys, time; rank = int(os.environ['RANK']); {code}"], count
    )


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not end after another has failed are killed soon."""
    monkeypatch.setattr(launch, "_END_S", 0.3)


def test_each_rank_finds_its_place_in_the_variables_of_torchrun(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PALESTRA_LAUNCHER")
    write = f"open({str(tmp_path)!r} + '/' + str(rank), 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert run(write, 3) == 0
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 3 {rank} 3 127.0.0.1 {os.getpid()}"


def test_the_status_is_that_of_the_rank_that_failed_first() -> None:
    assert run("time.sleep(300 * (rank == 0)); sys.exit(3 if rank else 4)") == 3


def test_a_rank_that_a_signal_ended_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("rank and os.kill(os.getpid(), 9); time.sleep(300); sys.exit(2)") == 128 + 9
    assert "rank 1 (process " in (told := capfd.readouterr().err)
    assert "was ended by SIGKILL" in told


def test_ranks_that_do_not_end_after_another_has_failed_are_killed() -> None:
    assert run("sys.exit(5) if rank else time.sleep(300)") == 5


def test_ctrl_c_is_handed_on_to_every_rank() -> None:
    rank = (
        "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); os.write(1, b'ready '); time.sleep(9)"
    )
    program = f"{LAUNCH}([sys.executable, '-c', {rank!r}], 2))"
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.read(12) == "ready ready "
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 7


def test_a_process_alone_is_the_first_and_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert RankVariables.of_environment() is None
    assert is_first_rank()
    monkeypatch.setenv("RANK", "1")  # as some schedulers set it for other programs
    assert RankVariables.of_environment() is None
    refuse_ranks("StepTrainer", "start it alone")
    for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert RankVariables.of_environment() == RankVariables(1, 4, 1, 2)
    assert not is_first_rank()
    with pytest.raises(
        PalestraError, match="StepTrainer runs in one process, and this is one of 4 ranks; start it alone"
    ):
        refuse_ranks("StepTrainer", "start it alone")
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(SettingError, match="start with torchrun"):
        RankVariables.of_environment()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_end_with_a_launcher_that_is_killed_while_they_start() -> None:
    rank = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    program = f"{LAUNCH}([sys.executable, '-c', {rank!r}], 2))"
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.kill()
    launcher.wait()
    assert launcher.stdout.read() == "", "both have closed their end of the pipe"
    assert len(set(pids)) == 2


LISTENERS = """
import os
from pathlib import Path
from palestra.core.config import RunConfig
from palestra.core.ranks import join
ranks = join(RunConfig.build({"model.device": "cpu"}))
assert ranks.gather(ranks.rank, int) == [0, 1]
names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
sockets = {os.readlink(name) for name in names if os.path.exists(name)}
rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]]
heard = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
Path(os.environ["TOLD"], str(ranks.rank)).write_text(" ".join(heard))
ranks._leave()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at a port where a stranger could join: they meet in a file of their user."""
    monkeypatch.setenv("TOLD", str(tmp_path))
    assert launch.launch_ranks([sys.executable, "-c", LISTENERS], 2) == 0
    heard = [address for rank in "01" for address in (tmp_path / rank).read_text().split()]
    assert heard, "gloo listens"
    assert {address.split(":")[0] for address in heard} <= {"0100007F", "00000000000000000000000001000000"}
