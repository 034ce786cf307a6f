"""A process is killed or stopped at any step of the commits that processes share, while others append."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from synchronizer.errors import ReaderGroupError
from synchronizer.store import Appended, UnknownOutcome
from synchronizer.stores.sqlite.commit_slots import CommitSlots
from synchronizer.stores.sqlite.store import SqliteStore
from tests.stopping import until_stopped
from tests.synchronizer.stores.processes import running
from tests.waiting import until

pytestmark = pytest.mark.skipif(not CommitSlots.is_available(), reason="no shared commits on this system")

OTHERS: Final = 3
#: How many lines of the store a process meets in its appends, while it leads, waits, hands over and is answered.
LINES: Final = 400
#: It fails at one of the first times that it meets a line.
MEETINGS: Final = 8
#: A process that meets its line less often fails after this number of steps.
STEPS: Final = 5000
#: So that appends are soon given up that wait for a process that is stopped.
WRITE_TIMEOUT: Final = 1.0


def append_until_told(
    connection: Connection, path: Path, number: int, step: tuple[int, int] = (0, 0), what: int = 0
) -> None:
    """Append until the other end sends something. Send what came of each append, and None after the last one.

    With ``step``, the process gets the signal ``what`` at this step.
    """
    with SqliteStore(str(path), write_timeout=WRITE_TIMEOUT) as store:
        count = 0
        while not connection.poll():
            data = b"%d-%06d" % (number, count)
            if count == 3 and what:  # it has waited for the others by now, and has a slot
                sys.settrace(_at_step(*step, lambda place: (connection.send(place), os.kill(os.getpid(), what))))
            try:
                answer = store.append("s", data + b";")
            except ReaderGroupError:
                connection.send(("refused", data, 0))
            else:
                assert isinstance(answer, Appended | UnknownOutcome)
                stored = isinstance(answer, Appended)
                connection.send(("stored", data, answer.offset) if stored else ("unknown", data, 0))
            count += 1
        sys.settrace(None)
        connection.recv()
    connection.send(None)


def _at_step(line: int, meeting: int, act: Callable[[str], object]) -> Callable[[FrameType, str, object], Any]:
    """A tracer that acts once: where the ``line``-th different line of the store is met for the ``meeting``-th time."""
    met: dict[str, tuple[int, int]] = {}  # by place: the number of its line, how often it was met
    left = STEPS

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return trace_line if "/stores/sqlite/" in frame.f_code.co_filename else None

    def trace_line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line" and left:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            number, count = met.get(place, (len(met), 0))
            met[place] = number, count + 1
            left -= 1
            if (number, count + 1) == (line, meeting) or not left:
                left = 0
                act(place)
        return trace_line

    return trace


class Told:
    """What one process has told so far."""

    def __init__(self, connection: Connection) -> None:
        self.outcomes: list[tuple[str, bytes, int]] = []
        self.place: str | None = None
        self.has_ended = False
        self._connection = connection

    def ended_calls(self, kind: str = "") -> int:
        self._hear()
        return sum(1 for outcome, _, _ in self.outcomes if kind in ("", outcome))

    def is_at_its_step(self) -> bool:
        self._hear()
        return self.place is not None

    def end(self) -> None:
        self._connection.send("end")
        until(lambda: self._hear() or self.has_ended, "the process ends")

    def _hear(self) -> None:
        try:
            while self._connection.poll():
                match self._connection.recv():
                    case None:
                        self.has_ended = True
                    case str(place):
                        self.place = place
                    case outcome:
                        self.outcomes.append(outcome)
        except EOFError:  # it was killed
            pass


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("times", [3, pytest.param(500, marks=[pytest.mark.broad, pytest.mark.timeout(3600)])])
def test_an_append_is_stored_once_whatever_befalls_a_process_at_any_step(
    times: int, what: signal.Signals, tmp_path: Path
) -> None:
    chance = random.Random(f"{times} {what}")
    places = {
        _let_one_fail(tmp_path / f"{number}.db", (chance.randrange(LINES), chance.randrange(1, MEETINGS + 1)), what)
        for number in range(times)
    }
    assert len(places) > times / 3


def _let_one_fail(path: Path, step: tuple[int, int], what: signal.Signals) -> str:
    with SqliteStore(str(path)) as store:
        store.create("s")
    with ExitStack() as opened:
        others = [
            Told(opened.enter_context(running(append_until_told, path, number + 1))[1]) for number in range(OTHERS)
        ]
        until(lambda: all(other.ended_calls() for other in others), "the others append")
        process, connection = opened.enter_context(running(append_until_told, path, 0, step, what))
        victim = Told(connection)
        until(victim.is_at_its_step, "the process comes to its step")
        if what == signal.SIGKILL:
            process.join()
            went_on = others
        else:
            until_stopped(process.pid)
            before = [other.ended_calls() for other in others]
            until(lambda: any(other.ended_calls() > ended for other, ended in zip(others, before, strict=True)))
            os.kill(process.pid, signal.SIGCONT)
            went_on = [victim, *others]
        stored = [each.ended_calls("stored") for each in went_on]
        for each, earlier in zip(went_on, stored, strict=True):
            until(
                lambda each=each, least=earlier + 3: each.ended_calls("stored") >= least,
                f"appends after {victim.place}",
            )
        for each in went_on:
            each.end()
    assert victim.place is not None
    _check(path, [victim, *others], victim.place)
    return victim.place


def _check(path: Path, processes: list[Told], place: str) -> None:
    with SqliteStore(str(path)) as store:
        data = store.read("s", 0, 1 << 26)
    counts = Counter(data.split(b";"))
    for outcome, record, offset in (each for told in processes for each in told.outcomes):
        where = f"{outcome} {record.decode()}, {counts[record]} times, beside {place}"
        match outcome:
            case "stored":
                assert counts[record] == 1 and data[offset : offset + len(record)] == record, where
            case "unknown":
                assert counts[record] <= 1, where
            case "refused":
                assert counts[record] == 0, where
    assert max(counts.values()) == 1  # also what nobody told of
