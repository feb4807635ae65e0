"""Runs one case of a storm, within a limit of time, and says what became of it."""

from __future__ import annotations

import contextlib
import faulthandler
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import IO

from tests.support.checked import environment
from tests.support.helpers import SWITCH
from tests.support.storm_case import Case, Deed
from tests.support.storm_loop import Loop
from tests.support.storm_reference import Deviation
from tests.support.storm_trainer import Holdings, captured_stderr, trainer_of

_LIMIT_S = 60.0
_LIMIT_AFTER_A_HANG_S = 15.0
_MAX_SHOWN = 6000


class Verdict(Enum):
    """What became of a case."""

    EQUAL = "equal to the inline executor's"
    EQUAL_TO_ERROR = "equal, up to the planted samples' errors"
    REFUSED = "equal up to a typed error, for which there was a reason"
    DEVIATION = "deviations"


@dataclass(frozen=True, slots=True)
class Result:
    """Of a case."""

    case: Case
    verdict: Verdict
    text: str
    """The typed error, or what is wrong."""
    num_batches: int
    deeds: Counter[Deed]
    seconds: float

    @property
    def symptom(self) -> str:
        """What is wrong, without the particulars."""
        first, _, rest = self.text.partition("\n")[0].partition(": ")
        return re.sub(r"\d+", "n", f"{first}: {rest.partition(':')[0]}" if first == "unplanted error" else first)

    def line(self) -> str:
        """Return the result in short."""
        first = self.text.splitlines()[0] if self.text else ""
        return f"{self.case.seed:10} {self.seconds:6.1f} s {self.num_batches:5} batches  {self.case.name}: " + (
            self.verdict.value if not first else f"{self.verdict.name}: {first[:200]}"
        )


class CaseHung(BaseException):
    """The case took too long."""


def run_case(case: Case) -> Result:
    """Return what became of a case; leaves nothing behind, but what shows up as a deviation."""
    begin_s = time.monotonic()
    with captured_stderr() as stderr, _limited() as stacks, warnings.catch_warnings(), environment(SWITCH, "0"):
        warnings.simplefilter("ignore")
        before = Holdings()
        run = Loop(case)
        verdict, text = _judge(run, case, stacks)
        wrong = [text] if verdict is Verdict.DEVIATION else []
        if left := before.left_behind():
            wrong.append(f"left behind: {left}")
        before.kill_new_children()
        told = _read(stderr)
    if "Traceback (most recent call last)" in told:
        wrong.append(f"on stderr: {told[-_MAX_SHOWN:].strip()}")
    if wrong:
        verdict, text = Verdict.DEVIATION, "\n".join(wrong)
    return Result(case, verdict, text, run.num_batches, run.deeds, time.monotonic() - begin_s)


def _judge(run: Loop, case: Case, stacks: IO[str]) -> tuple[Verdict, str]:
    """Run a case; return what became of it, and in words what is wrong, or what error ended it."""
    try:
        with trainer_of(case) as surroundings:
            try:
                run.go(surroundings)
            finally:
                run.let_go()  # while its descriptors are what they were when they were opened
    except Deviation as deviation:
        return Verdict.DEVIATION, str(deviation)
    except CaseHung as hung:
        frames = "".join(traceback.format_tb(hung.__traceback__))
        return Verdict.DEVIATION, f"hang: not done within {_LIMIT_S} s\n{frames}\n{_read(stacks)}"
    except Exception as error:
        if run.is_planted(error):
            return Verdict.REFUSED, f"{type(error).__name__}: {error}"
        shown = "".join(traceback.format_exception(error))[-_MAX_SHOWN:]
        return Verdict.DEVIATION, f"unplanted error: {type(error).__name__}: {error}\n{shown}"
    return (Verdict.EQUAL_TO_ERROR if run.has_met_planted else Verdict.EQUAL), ""


@contextlib.contextmanager
def _limited() -> Iterator[IO[str]]:
    """Raise `CaseHung` in the main thread once the time is up; yields the file with all stacks."""
    with tempfile.TemporaryFile("w+") as stacks:

        def ring(number: int, frame: FrameType | None) -> None:
            faulthandler.dump_traceback(stacks)
            signal.setitimer(signal.ITIMER_REAL, _LIMIT_AFTER_A_HANG_S)
            raise CaseHung

        old = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
        try:
            yield stacks
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
