"""Exactly once into a database: positions are committed after the data, and the database refuses duplicates.

The pointer of an event is the same at every delivery, so the sink uses it as the key of the event. The fencing token
grows with every change of owner, so the sink can refuse a reader that lost the segment and does not know it yet.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg

SCHEMA = """
create table orders(pointer text primary key, customer text, body blob);
create table owner(segment text primary key, token integer);
"""


def store(sink: sqlite3.Connection, batch: rg.EventBatch[bytes]) -> None:
    with sink:
        owner = sink.execute(
            "insert into owner values(?1, ?2) on conflict do update set token = ?2 where token <= ?2 returning token",
            (batch.segment, batch.fencing_token),
        ).fetchone()
        if owner is None:
            raise RuntimeError(f"a newer reader owns {batch.segment}")
        rows = [(str(event.pointer), event.routing_key, event.raw) for event in batch]
        sink.executemany("insert into orders values(?, ?, ?) on conflict do nothing", rows)


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client, closing(sqlite3.connect(folder / "sink.db")) as sink:
        sink.executescript(SCHEMA)
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        with client.writer("shop/orders") as writer:
            for number in range(1000):
                writer.write(b"order %d" % number, routing_key=f"customer-{number % 10}")
        client.streams.seal("shop/orders")

        group = client.groups.create("archive", streams=["shop/orders"])
        with group.reader("reader-1", auto_commit=False) as reader:
            store(sink, reader.read_batch(100))  # the reader fails before it commits
        with group.reader("reader-1", auto_commit=False) as reader:
            for batch in reader.batches(max_events=100):
                store(sink, batch)
                reader.commit()
        print(*sink.execute("select count(*) from orders").fetchone(), "orders, each once")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
