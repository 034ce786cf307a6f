"""Two releases share a state on SQLite while one after the other its processes are replaced [F12]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from synchronizer import StateSynchronizer, open_store
from tests.clean_processes import CLEAN
from tests.synchronizer.releases import NewVisit, NewVisits, Recount, Report, visit

LONG = 60.0


class Process:
    def __init__(self, url: str, release: str) -> None:
        self._ours, theirs = CLEAN.Pipe()
        self.process = CLEAN.Process(target=visit, args=(theirs, url, release), daemon=True)
        self.process.start()
        assert self._receive() == "ready"

    def stop(self) -> Report:
        self._ours.send("stop")
        return self.report()

    def report(self) -> Report:
        """What it says at its end, which it comes to by itself."""
        report = self._receive()
        assert isinstance(report, Report)
        self.process.join(LONG)
        return report

    def _receive(self) -> object:
        assert self._ours.poll(LONG), "a process says nothing"
        return self._ours.recv()


@contextmanager
def killed_at_the_end(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in processes:
            each.process.kill()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/visits.db"


def visits(url: str) -> NewVisits:
    with open_store(url) as store:
        return StateSynchronizer(store, "visits", state_type=NewVisits, updates=[NewVisit, Recount]).state


def test_processes_are_replaced_one_by_one_while_all_of_them_write(url: str) -> None:
    running: list[Process] = []
    with killed_at_the_end(running):
        running += [Process(url, "old") for _ in range(2)]
        reports = []
        for _ in range(2):
            running.append(Process(url, "new"))
            reports.append(running.pop(0).stop())
        # Everybody knows what is new: it may be written.
        running.append(Process(url, "door"))
        running.append(Process(url, "recount"))
        reports += [each.stop() for each in running]
    assert [report.stopped_by for report in reports] == [None] * 6
    assert all(report.stored for report in reports)
    assert visits(url).number == sum(report.stored for report in reports)


@pytest.mark.parametrize(
    ("release", "facts"), [("door", {"tag": "visit", "fields": ["door"]}), ("recount", {"tag": "recount"})]
)
def test_an_old_process_that_meets_something_new_stops_and_has_written_nothing_after_it(
    url: str, release: str, facts: dict[str, object]
) -> None:
    running: list[Process] = []
    with killed_at_the_end(running):
        running.append(Process(url, "old"))
        running.append(Process(url, release))
        stopped = running[0].report()
        going_on = Process(url, "new")
        running.append(going_on)
        reports = [stopped, running[1].stop(), going_on.stop()]
    error = stopped.stopped_by
    assert error is not None and "deploy" in error.message
    assert {key: error.facts[key] for key in facts} == facts
    assert "revision" in error.facts
    assert stopped.number >= stopped.stored  # it shows the last state that it understood
    assert all(report.stored for report in reports[1:])
    assert visits(url).number == sum(report.stored for report in reports)
