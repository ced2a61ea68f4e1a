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
BLOCKED_S = 60.0  # without computing: a loaded machine may not give one input 5 s of CPU in less


class Hang(BaseException):
    """One input took HANG_S of CPU or BLOCKED_S in all; not an Exception, so that nothing on the way swallows it."""


@dataclass
class Tally:
    """How often each outcome came; what may not happen is kept with the input's number."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def fault(self, what: str) -> None:
        """Count and print a fault at once, so that an interrupted run keeps its list."""
        self.outcomes["FAULT"] += 1
        self.faults.append(what)
        print("\n  ".join([f"FAULT: {self.name}", *printable(what[:4000]).split("\n")]), flush=True)

    def show(self, seconds: float) -> None:
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in self.outcomes.most_common())
        print(f"{self.name}: {counts}; slowest {self.slowest_s:.1f} s; {seconds:.0f} s in all", flush=True)

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Run the body: it may end, or raise a PalestraError; anything else is a fault, as is taking too long."""
        began = time.process_time()
        try:
            with _alarm():
                yield
            self.outcomes["accepted"] += 1
        except PalestraError as error:
            if "\n" in str(error) or not str(error):
                self.fault(f"{what}: an error of several lines: {error}")
            else:
                self.outcomes["refused"] += 1
        except Hang:
            self.fault(
                f"{what}: took longer than {HANG_S:g} s of CPU or {BLOCKED_S:g} s\n{traceback.format_exc(limit=-4)}"
            )
        except Exception as error:
            self.fault(f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
        self.slowest_s = max(self.slowest_s, time.process_time() - began)


def printable(text: str) -> str:
    """The text in ASCII, with everything else but line breaks escaped: faults hold surrogates and escape sequences."""
    return "\n".join(ascii(line)[1:-1] for line in text.split("\n"))


@contextmanager
def _alarm() -> Iterator[None]:
    def raise_hang(number: int, frame: FrameType | None) -> None:
        raise Hang

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, HANG_S), (signal.SIGALRM, signal.ITIMER_REAL, BLOCKED_S))
    before = [signal.signal(number, raise_hang) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)
        for (number, _, _), handler in zip(timers, before, strict=True):
            signal.signal(number, handler)


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
