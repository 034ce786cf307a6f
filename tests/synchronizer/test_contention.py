"""Real processes that update one state at the same time."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

import pytest

from synchronizer import Appended, AppendResult, AttributeChange, open_store
from synchronizer.testing import FailingStore
from tests.synchronizer.accounts import Account, Add, Put, opened

LONG = 60.0
PROCESSES = 8
#: Updates that all of them make in a turn.
TOGETHER = 800


class CountingStore(FailingStore):
    """Counts the appends that were stored, those that lost a race, and how often a turn in line was awaited in vain."""

    stored = lost = in_vain = 0

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        answer = super().append(segment, data, expected_offset=expected_offset, attributes=attributes)
        won = isinstance(answer, Appended)
        self.stored += won
        self.lost += not won
        return answer

    @contextmanager
    def fair_lock(self, segment: str, timeout: float) -> Iterator[bool]:
        with super().fair_lock(segment, timeout) as has_turn:
            self.in_vain += timeout > 0 and not has_turn
            yield has_turn


def contend(connection: Connection, url: str, name: str, everybody: int) -> None:
    """Update until all processes together have made so many updates."""
    with open_store(url) as inner:
        store = CountingStore(inner)
        replica = opened(store, compaction_bytes=20_000)
        store.stored = store.lost = store.in_vain = 0
        connection.send("ready")
        connection.recv()
        own = 0
        while replica.state.value < everybody:

            def count(state: Account, own: int = own) -> list[Add | Put]:
                assert state.entries.get(name, 0) == own, "an update of this process is missing or there twice"
                return [Add(), Put(key=name, value=own + 1)]

            replica.update_state(count, timeout=LONG)
            own += 1
        connection.send((own, store.stored, store.lost, store.in_vain))


@contextmanager
def running(url: str, turn: int, everybody: int) -> Iterator[list[Connection]]:
    """Processes that are killed at the end if they still run."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        process = context.Process(target=contend, args=(there, url, f"process-{turn}-{number}", everybody), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        connections.append(here)
    try:
        yield connections
    finally:
        for process in processes:
            process.kill()
            process.join(LONG)
            assert process.exitcode in (0, -signal.SIGKILL)


def receive(connection: Connection) -> object:
    assert wait([connection], LONG), "a process does not answer"
    return connection.recv()


def contended(url: str, turn: int, before: int) -> tuple[Mapping[str, int], int, int, int]:
    """How many updates each of the processes made, and what all of them together counted."""
    with running(url, turn, before + TOGETHER) as connections:
        for connection in connections:
            assert receive(connection) == "ready"
        for connection in connections:
            connection.send("go")
        results = [receive(connection) for connection in connections]
    counts = {f"process-{turn}-{number}": own for number, (own, *_) in enumerate(results)}  # type: ignore[misc]
    stored, lost, in_vain = (sum(result[place] for result in results) for place in (1, 2, 3))  # type: ignore[index]
    return counts, stored, lost, in_vain


@pytest.mark.timeout(180)
def test_eight_processes_all_get_their_turn_and_each_update_counts_once(shared_store_url: str) -> None:
    url = shared_store_url
    with open_store(url) as store:
        opened(store)
    everything: dict[str, int] = {}
    for turn in range(2):
        before = sum(everything.values())
        counts, stored, lost, in_vain = contended(url, turn, before)
        everything |= counts
        with open_store(url) as store:
            state = opened(store).state
        assert state.value == sum(everything.values()) >= before + TOGETHER
        assert state.entries == everything
        # What is aimed at is a half and more of the mean, and of the attempts; other load takes some of it.
        slowest, mean = min(counts.values()), sum(counts.values()) / PROCESSES
        if slowest >= mean / 4 and stored > lost:
            return
        # Where the line stands still for longer than they wait, because who has the turn is paused, they go on without.
        assert in_vain, f"not all got their turn: {counts}, {stored} appends were stored and {lost} lost a race"
    pytest.fail(f"not all got their turn, twice: {counts}, {stored} appends were stored and {lost} lost a race")
