"""What a fuzzer counts, and how it watches one input."""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from palestra.core.errors import PalestraError

HANG_S = 5.0


class Hang(BaseException):
    """One input took longer than HANG_S; not an Exception, so that nothing on the way swallows it."""


@dataclass
class Tally:
    """How often each outcome came; what may not happen is kept with the input's number."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def fault(self, what: str) -> None:
        self.outcomes["FAULT"] += 1
        self.faults.append(what)

    def show(self, seconds: float) -> None:
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in self.outcomes.most_common())
        print(f"{self.name}: {counts}; slowest {self.slowest_s:.1f} s; {seconds:.0f} s in all", flush=True)
        for fault in self.faults[:20]:
            print(f"  {fault[:2000]}", flush=True)

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Run the body: it may end, or raise a PalestraError; anything else is a fault, as is taking too long."""
        began = time.monotonic()
        try:
            with _alarm(HANG_S):
                yield
            self.outcomes["accepted"] += 1
        except PalestraError as error:
            if "\n" in str(error) or not str(error):
                self.fault(f"{what}: an error of several lines: {error}")
            else:
                self.outcomes["refused"] += 1
        except Hang:
            self.fault(f"{what}: took longer than {HANG_S:g} s\n{traceback.format_exc(limit=-4)}")
        except Exception as error:
            self.fault(f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def raise_hang(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, raise_hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, set to extremes, cut out, doubled, or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not changed:
            break
        at = rng.randrange(len(changed))
        match rng.randrange(7):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                changed[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"))
            case 3:
                changed[at : at + 8] = rng.randbytes(8)
            case 4:
                del changed[at : at + rng.randrange(1, 64)]
            case 5:
                changed[at:at] = changed[at : at + rng.randrange(1, 64)]
            case 6:
                if rng.random() < 0.2:
                    del changed[at:]
    return bytes(changed)


def run(fuzzers: dict[str, Callable[[int, random.Random, Path], Tally]], counts: dict[str, int], seed: int) -> int:
    """Run the fuzzers; the exit status is 1 if there was a fault."""
    failed = False
    for name, count in counts.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="palestra-fuzz-") as folder:
            tally = fuzzers[name](count, random.Random(f"{seed}/{name}"), Path(folder))
        tally.show(time.monotonic() - began)
        failed |= bool(tally.faults)
    print("faults were found" if failed else "no faults", file=sys.stderr)
    return int(failed)
