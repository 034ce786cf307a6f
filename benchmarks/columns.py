"""Events as columns: `write_arrow`, `write_batch` and `read_arrow` beside Parquet of the same table by pyarrow.

Parquet is flushed to the disk, as the events are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pyarrow
import pyarrow.parquet

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, folder, rate, wall
from .stores import SqliteStore, Store

EVENTS = 1_000_000
KEYS = [f"key-{number}" for number in range(1000)]
ROUNDS = 5
#: What `read_arrow` gives an application that needs only the events and their places.
FEW = ["event", "offset"]


def columns(store: Store) -> Iterator[Result]:
    """A million different events of 100 bytes with a routing key, as Arrow into a stream and out of a group."""
    with store.fresh() as url, folder() as place, rg.connect(url) as client:
        table, numbers = _table(), count()
        events, keys = table["payload"].to_pylist(), table["customer"].to_pylist()

        def writing(write: Callable[[rg.EventWriter[bytes]], object]) -> Rate:
            stream = f"bench/written-{next(numbers)}"
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(4))
            with client.writer(stream) as writer:

                def run() -> None:
                    write(writer)
                    writer.flush()

                measured = rate(EVENTS, run)
            client.streams.seal(stream)
            client.streams.delete(stream)
            return measured

        def reading(columns: list[str] | None) -> Rate:
            group = client.groups.create(f"group-{next(numbers)}", streams=["bench/events"])
            with group.reader("reader") as reader:

                def run() -> None:
                    left = EVENTS
                    while left:
                        left -= reader.read_arrow(columns=columns).num_rows

                measured = rate(EVENTS, run)
            client.groups.delete(group.name)
            return measured

        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(4))
        with client.writer("bench/events") as writer:
            _write_table(table, writer)
        file = place / "events.parquet"
        tables, lists, parquet_written, few, all_columns, parquet_read = alternate(
            ROUNDS,
            partial(writing, partial(_write_table, table)),
            partial(writing, lambda writer: writer.write_batch(events, routing_keys=keys)),
            lambda: rate(EVENTS, partial(_write_parquet, table, file)),
            partial(reading, FEW),
            partial(reading, None),
            lambda: rate(EVENTS, partial(pyarrow.parquet.read_table, file)),
        )
    is_sqlite = isinstance(store, SqliteStore)
    for what, rates, target, parquet in (
        ("write_arrow with a routing key until flush returns", tables, 2_000_000, parquet_written),
        ("write_batch of lists with routing keys until flush returns", lists, 2_000_000, parquet_written),
        (f"read_arrow through a group, columns {' and '.join(FEW)}", few, 8_000_000, parquet_read),
        ("read_arrow through a group, all default columns", all_columns, None, parquet_read),
    ):
        yield Figure(
            what=f"{what}, {store.title}",
            value=wall(rates),
            unit="events/s",
            target=target if is_sqlite else None,
            beside=f"{described(rates)}. Parquet by pyarrow: {wall(parquet):,.0f}/s; {described(parquet)}",
            held_back_by="the flush of the disk for writes, and the processor time that is left for the process",
        )


def _table() -> pyarrow.Table:
    """All events are different, because Parquet stores repeated values once."""
    data = os.urandom(len(PAYLOAD) * EVENTS)
    bounds = pyarrow.array(range(0, len(data) + 1, len(PAYLOAD)), pyarrow.int32()).buffers()[1]
    events = pyarrow.Array.from_buffers(pyarrow.binary(), EVENTS, [None, bounds, pyarrow.py_buffer(data)])
    keys = pyarrow.array([KEYS[number % len(KEYS)] for number in range(EVENTS)])
    return pyarrow.table({"payload": events, "customer": keys})


def _write_table(table: pyarrow.Table, writer: rg.EventWriter[bytes]) -> None:
    writer.write_arrow(table, data="payload", routing_key="customer")


def _write_parquet(table: pyarrow.Table, path: Path) -> None:
    with path.open("wb") as file:
        pyarrow.parquet.write_table(table, file, compression="none")
        file.flush()
        os.fsync(file.fileno())
