"""The programs of docs/howto/run-workers.md, as printed, in processes on a PostgreSQL server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import readergroup as rg
from tests.places import DOCS
from tests.waiting import PATIENCE_SECONDS, until

PAGE = (DOCS / "howto" / "run-workers.md").read_text()
SEGMENTS = {f"shop/orders/{number}" for number in range(4)}


class Terminals:
    """Programs of the page, each with its output in a file."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self._folder = folder
        self._environment = {**os.environ, "DATABASE_URL": database_url}
        for name, program in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            (folder / name).write_text(program)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, program: str) -> int:
        """Start the program, and return the number of its terminal."""
        with open(self._folder / f"output-{len(self.processes)}", "wb") as output:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, program],
                    cwd=self._folder,
                    env=self._environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        return len(self.processes) - 1

    def lines(self, terminal: int) -> list[str]:
        return (self._folder / f"output-{terminal}").read_text().splitlines()

    def owned(self, terminal: int) -> set[str]:
        """The segments that the worker said to own and has not released since."""
        owned: set[str] = set()
        for line in self.lines(terminal):
            word, _, segment = line.partition(" ")
            owned = owned | {segment} if word == "owns" else owned - {segment} if word == "releases" else owned
        return owned

    def orders(self, terminal: int) -> set[str]:
        return {line for line in self.lines(terminal) if line.startswith("order ")}


@pytest.fixture
def terminals(tmp_path: Path, database_url: str) -> Iterator[Terminals]:
    opened = Terminals(tmp_path, database_url)
    with ExitStack() as ending:
        yield opened
        for process in opened.processes:
            process.kill()
            ending.callback(process.wait)


def test_two_workers_share_the_segments_and_one_takes_over_those_of_a_killed_one(
    terminals: Terminals, database_url: str
) -> None:
    first, second = terminals.start("worker.py"), terminals.start("worker.py")  # both create the stream and the group

    def both_have_two() -> bool:
        owned = terminals.owned(first), terminals.owned(second)
        return owned[0] | owned[1] == SEGMENTS and [len(each) for each in owned] == [2, 2]

    until(both_have_two)
    written = {f"order {number}" for number in range(100)}
    assert terminals.processes[terminals.start("write.py")].wait(PATIENCE_SECONDS) == 0
    until(lambda: terminals.orders(first) | terminals.orders(second) == written)
    assert terminals.orders(first) and terminals.orders(second)

    terminals.processes[first].kill()
    until(lambda: terminals.owned(second) == SEGMENTS)
    before = len(terminals.lines(second))
    assert terminals.processes[terminals.start("write.py")].wait(PATIENCE_SECONDS) == 0
    until(lambda: set(terminals.lines(second)[before:]) >= written)
    terminals.processes[second].terminate()
    assert terminals.processes[second].wait(PATIENCE_SECONDS) == 0
    with rg.connect(database_url) as client:
        assert not client.groups.get("billing").online_readers()


def test_the_pool_of_the_page_handles_each_order_and_ends_at_sigterm(terminals: Terminals) -> None:
    pool = terminals.start("pool.py")
    assert terminals.processes[terminals.start("write.py")].wait(PATIENCE_SECONDS) == 0
    until(lambda: terminals.orders(pool) == {f"order {number}" for number in range(100)})
    terminals.processes[pool].terminate()
    assert terminals.processes[pool].wait(PATIENCE_SECONDS) == 0


def test_the_later_of_two_readers_with_one_id_replaces_the_former(store_url: str) -> None:
    with rg.connect(store_url) as client:
        client.streams.create("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        with group.reader("reader-1") as former:
            assert former.read(timeout=0) is None
            with group.reader("reader-1") as later:
                assert group.online_readers() == ["reader-1"]
                for _ in range(2):
                    with pytest.raises(rg.ReaderNotInGroupError, match="another process took over the reader's id"):
                        former.read(timeout=0)
                assert later.read(timeout=0.1) is None
                assert later.assigned_segments == ("shop/orders/0",)
