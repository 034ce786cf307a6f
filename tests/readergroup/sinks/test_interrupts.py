"""Interrupts of a transaction by hand, as by Ctrl-C in a notebook, which keeps the frames of the call."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import readergroup as rg
from readergroup.sinks import SqlSink
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.readergroup.sinks.conftest import STREAM, write


@FEW_OR_MORE
def test_after_an_interrupt_no_transaction_remains(client: rg.Client, tmp_path: Path, sparsely: int) -> None:
    path = tmp_path / "application.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE effects (data)")
    write(client, 1000, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(lambda: sqlite3.connect(path))
    with group.reader() as reader:
        events = [*reader.read_batch(1000)]

        def store() -> None:
            with suppress(rg.EventStoredError), sink.transaction(events[-1]) as connection:
                connection.execute("INSERT INTO effects VALUES (?)", (events[-1].data,))

        events.reverse()
        store()
        for run in interrupts(store, one_in=sparsely, before=events.pop):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            if run.place.partition(":")[0].endswith(".store"):  # where Python calls `__exit__`, which has not begun
                run.error.__traceback__ = None
            with closing(sqlite3.connect(path, timeout=0)) as other:
                other.execute("INSERT INTO effects VALUES ('other')")  # it raises if the database is locked
            store()
    with closing(sqlite3.connect(path)) as database:
        stored = database.execute("SELECT data, count(*) FROM effects GROUP BY data").fetchall()
    assert stored and {number for _, number in stored} == {1}
