"""Real processes that update one state at the same time."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from statistics import mean

import pytest

from synchronizer import Appended, AppendResult, AttributeChange, open_store
from synchronizer.testing import FailingStore
from tests.clean_processes import CLEAN
from tests.stopping import until_stopped
from tests.synchronizer.accounts import Account, Add, Put, Replica, opened

LONG = 100.0
PROCESSES = 8
#: Updates that all of them make together, before it is seen how many each has made. Whoever runs alone for a thousand
#: is found out.
TOGETHER = 200
#: The entry with the value of the state at which all of them end.
END = "end"


class ContendersStore(FailingStore):
    """Counts the appends that were stored, and those that lost a race. Can stop its process in its turn in line."""

    stored = lost = 0
    turns_until_stop = 0

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
    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> Iterator[bool]:
        with super().fair_lock(segment, timeout, patience) as has_turn:
            if timeout > 0 and has_turn and self.turns_until_stop:
                self.turns_until_stop -= 1
                if not self.turns_until_stop:
                    os.kill(os.getpid(), signal.SIGSTOP)
            yield has_turn


def contend(connection: Connection, url: str, name: str, turns_until_stop: int) -> None:
    """Update until the state is at its end."""
    with open_store(url) as inner:
        store = ContendersStore(inner)
        replica = opened(store, compaction_bytes=20_000)
        connection.send("ready")
        connection.recv()
        store.stored = store.lost = 0
        store.turns_until_stop = turns_until_stop
        own = 0
        while replica.state.value < replica.state.entries.get(END, math.inf):

            def count(state: Account, own: int = own) -> list[Add | Put]:
                assert state.entries.get(name, 0) == own, "an update of this process is missing or there twice"
                return [Add(), Put(key=name, value=own + 1)]

            replica.update_state(count, timeout=LONG)
            own += 1
        connection.send((own, store.stored, store.lost))


class Contender:
    """A process that contends."""

    def __init__(self, url: str, number: int, turns_until_stop: int) -> None:
        self.name = f"process-{number}"
        self.connection, there = CLEAN.Pipe()
        arguments = there, url, self.name, turns_until_stop
        self.process = CLEAN.Process(target=contend, args=arguments, daemon=True)
        self.process.start()
        there.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join(LONG)
        assert self.process.exitcode in (0, -signal.SIGKILL)


@contextmanager
def contending(url: str, *, turns_until_stop: int = 0) -> Iterator[tuple[Replica, list[Contender]]]:
    """Processes that contend from now on, the first of which stops itself after so many turns in line."""
    with open_store(url) as store, ExitStack() as running:
        replica, contenders = opened(store), []
        for number in range(PROCESSES):
            contenders.append(Contender(url, number, turns_until_stop if number == 0 else 0))
            running.callback(contenders[-1].end)
        for contender in contenders:
            assert received(contender) == "ready"
        for contender in contenders:
            contender.connection.send("go")
        yield replica, contenders


def received(contender: Contender) -> object:
    assert wait([contender.connection], LONG), "a process does not answer"
    return contender.connection.recv()


def check_fairness(replica: Replica, contenders: list[Contender]) -> None:
    """A half of the mean and more is what each is to make; other load takes some of it, and now and then more."""
    for _ in range(10):
        before = replica.fetch_updates()
        after = replica.wait_for(lambda state, goal=before.value + TOGETHER: state.value >= goal, timeout=LONG)
        counts = [after.entries.get(each.name, 0) - before.entries.get(each.name, 0) for each in contenders]
        if min(counts) >= mean(counts) / 4:
            return
    pytest.fail(f"not all got their turn: {counts}")


def end(replica: Replica, contenders: list[Contender]) -> tuple[int, int]:
    """Each update is there once; of all of the processes, how many attempts were stored and lost."""
    replica.update_state(lambda state: [Put(key=END, value=state.value)], timeout=LONG)
    answers = [received(contender) for contender in contenders]
    assert replica.fetch_updates().value == sum(own for own, _, _ in answers)
    return sum(stored for _, stored, _ in answers), sum(lost for _, _, lost in answers)


def test_eight_processes_all_get_their_turn_and_each_update_counts_once(shared_store_url: str) -> None:
    with contending(shared_store_url) as (replica, contenders):
        check_fairness(replica, contenders)
        stored, lost = end(replica, contenders)
    assert stored > lost / 2  # on a busy machine; without the line it is a third


def test_all_get_their_turn_again_when_one_has_been_stopped_while_it_had_its_own(shared_store_url: str) -> None:
    with contending(shared_store_url, turns_until_stop=5) as (replica, contenders):
        stopped, *others = contenders
        pid = stopped.process.pid
        assert pid is not None
        until_stopped(pid)
        then = replica.fetch_updates().entries

        def others_go_on(state: Account) -> bool:
            return all(state.entries.get(each.name, 0) > then.get(each.name, 0) + 1 for each in others)

        replica.wait_for(others_go_on, timeout=LONG)
        os.kill(pid, signal.SIGCONT)
        check_fairness(replica, contenders)
        end(replica, contenders)
