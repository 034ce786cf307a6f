"""Elections among processes that are killed, stopped for longer than their lease lasts, and that end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.readergroup.reader_processes import kill, receive, running
from tests.stopping import stopped
from tests.synchronizer.recipes.coordination.candidate_processes import Sink, check_and_write_late, lead
from tests.waiting import busyness, until

TIMEOUT = 1.0
#: So long may a busy machine pause a process.
PAUSE = 5.0
#: Nothing waits for it to pass.
LONG_TIMEOUT = 200.0


class Election:
    def __init__(self, url: str, folder: Path, closing: ExitStack) -> None:
        self.url = url
        self.path = folder / "sink.jsonl"
        self.sink = Sink(self.path)
        self.processes: dict[str, tuple[BaseProcess, Connection]] = {}
        self._closing = closing

    def start(self, candidate_id: str, timeout_seconds: float = TIMEOUT) -> None:
        running_process = running(lead, self.url, candidate_id, self.path, timeout_seconds)
        self.processes[candidate_id] = self._closing.enter_context(running_process)
        assert receive(self.processes[candidate_id][1]) == "ready"

    def next_leader(self, before: str, seconds: float) -> float | None:
        """How long it takes until a write of another is accepted; None if that is too long."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if self.sink.leader != before:
                return time.monotonic() - began
            time.sleep(0.01)
        return None


@pytest.fixture
def election(shared_store_url: str, tmp_path: Path) -> Iterator[Election]:
    with ExitStack() as closing:
        yield Election(shared_store_url, tmp_path, closing)


def check_tokens(sink: Sink) -> None:
    """A token is one candidate's, and no check passes after one has passed for a greater token."""
    holders: dict[int, str] = {}
    for write in sink.sent:
        assert holders.setdefault(write.token, write.candidate) == write.candidate
    first_later = float("inf")  # when a check passed for a greater token, at the latest
    for token in sorted(holders, reverse=True):
        of_token = [write for write in sink.sent if write.token == token]
        assert max(write.from_time for write in of_token) <= first_later
        first_later = min(first_later, *(write.to_time for write in of_token))


def test_s7_under_kills_and_stops_no_two_leaders_are_accepted(election: Election) -> None:
    for name in "abc":
        election.start(name)
    until(lambda: election.sink.leader is not None, "a leader")
    dead = election.sink.leader
    assert dead is not None
    kill(election.processes[dead][0])
    took = election.next_leader(dead, (TIMEOUT + 2) * busyness() + PAUSE)
    assert took is not None, "nobody took over within the timeout and two seconds"
    election.start(f"{dead} again")
    former = election.sink.leader
    assert former is not None
    with stopped(election.processes[former][0], election.url):
        until(lambda: election.sink.leader != former, "another leader")
    writes = len(election.sink.sent)
    until(lambda: len(election.sink.sent) > writes + 20, "more writes")
    assert len({write.token for write in election.sink.accepted}) >= 3
    check_tokens(election.sink)


def test_a_leader_that_ends_is_replaced_at_once(election: Election) -> None:
    for name in "ab":
        election.start(name, LONG_TIMEOUT)
        until(lambda: election.sink.leader is not None, "a leader")
    leader = election.sink.leader
    assert leader == "a"
    election.processes[leader][1].send("end")
    assert election.next_leader(leader, LONG_TIMEOUT / 2) is not None
    check_tokens(election.sink)


def test_s7_what_a_stopped_leader_writes_late_is_refused(election: Election) -> None:
    with running(check_and_write_late, election.url, "late", election.path, TIMEOUT) as (process, connection):
        assert receive(connection) == "checked"
        election.start("next")
        with stopped(process, election.url):
            until(lambda: election.sink.leader == "next", "another leader")
            connection.send("write")  # what it finds when it goes on
        assert receive(connection) == "lost"
        assert [write.candidate for write in election.sink.sent].count("late") == 1
        assert "late" not in {write.candidate for write in election.sink.accepted}
        kill(process)
