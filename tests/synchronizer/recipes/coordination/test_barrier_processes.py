"""A barrier among processes, one of which is killed, or stopped for longer than its lease lasts, while it waits."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import readergroup as rg
from tests.readergroup.reader_processes import kill, receive, running
from tests.stopping import stopped
from tests.waiting import until

TIMEOUT = 3.0
LONG = 60.0
BROKEN = "broken"


def wait_when_told(connection: Connection, url: str, party: str, _: Path, __: float) -> None:
    """Wait at the barrier whenever asked to, with the timeout that comes with it, and answer how it ended."""
    with rg.connect(url) as client:
        while True:
            timeout_seconds = connection.recv()
            barrier = client.barrier("start", 3, party=party, member_timeout_seconds=timeout_seconds)
            try:
                connection.send(barrier.wait(timeout=LONG))
            except rg.BrokenBarrierError:
                connection.send(BROKEN)


def test_nobody_waits_for_one_who_died_or_is_stopped_and_later_all_pass(shared_store_url: str, tmp_path: Path) -> None:
    with ExitStack() as closing:

        def start(party: str) -> tuple[BaseProcess, Connection]:
            return closing.enter_context(running(wait_when_told, shared_store_url, party, tmp_path))

        (first, one), (_, another) = start("a"), start("b")
        barrier = closing.enter_context(rg.connect(shared_store_url)).barrier("start", 3)

        def two_wait(timeout_seconds: float = TIMEOUT) -> None:
            def are_there() -> bool:
                for connection in one, another:
                    if connection.poll():  # a busy machine may pause for as long as a lease lasts: then both come again
                        assert receive(connection) == BROKEN
                        connection.send(timeout_seconds)
                return len(barrier.synchronizer.fetch_updates().waiting) == 2

            for connection in one, another:
                connection.send(timeout_seconds)
            until(are_there, "two wait")

        def all_pass() -> None:
            two_wait(LONG)  # a slow process keeps its lease
            assert {barrier.wait(timeout=LONG), receive(one), receive(another)} == {0, 1, 2}

        all_pass()
        two_wait()
        kill(first)
        assert receive(another) == BROKEN
        first, one = start("a")
        all_pass()
        two_wait()
        with stopped(first, shared_store_url):
            until(another.poll, "the others hear of it")
        assert receive(another) == receive(one) == BROKEN
        all_pass()
