"""Writers in processes of their own that note times and are killed, and a reader that holds them to it."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import readergroup as rg
from tests.readergroup.reader_processes import STREAM, kill, receive, running
from tests.waiting import until

#: The events of this writer are older than those of the others.
LATE = "late"


def write(connection: Connection, url: str, name: str, _: Path, timeout: float) -> None:
    """Write events, from when the writer counts until a message comes."""
    age = timedelta(seconds=2 if name == LATE else 0)
    with rg.connect(url) as client, client.writer(STREAM, event_time_timeout_seconds=timeout) as writer:
        writer.note_time(datetime.now(UTC) - age)
        mark = client.streams.watermarks._attributes
        until(lambda: f"mark/{STREAM}/{writer._appender.writer_id.hex()}" in mark("mark/"))
        connection.send("counts")
        number = 0
        while not connection.poll(0.001):
            at = datetime.now(UTC) - age
            writer.write(name.encode(), f"{name}{number % 7}", event_time=at)
            if number % 100 == 0:
                with writer.transaction() as transaction:
                    transaction.write(name.encode(), name, event_time=at)
            writer.note_time(at)
            number += 1
    connection.send("done")


def test_no_event_of_a_killed_writer_is_behind_the_watermark(shared_store_url: str, tmp_path: Path) -> None:
    client = rg.connect(shared_store_url)
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    lower = datetime.min.replace(tzinfo=UTC)
    seen: set[str] = set()
    with client, client.groups.create("g", streams=[STREAM]).reader() as reader, ExitStack() as stack:

        def look() -> datetime:
            """Read what is there, then ask for the window; what is read after that is not before it."""
            nonlocal lower
            while (batch := reader.read_batch(timeout=0)) is not None and len(batch):
                for event in batch:
                    assert event.event_time is not None
                    seen.add(event.raw.decode())
                    assert event.event_time >= lower or event.raw == b"victim"
            bound = reader.time_window(STREAM).lower_bound
            assert bound is None or bound >= lower
            lower = bound or lower
            return lower

        started = []
        # A dead writer may hold the watermark for a second only; the others for a minute, however slow they are.
        for name, timeout in ((LATE, 60.0), ("one", 60.0), ("victim", 1.0)):
            process, connection = stack.enter_context(running(write, shared_store_url, name, tmp_path, pause=timeout))
            assert receive(connection) == "counts"  # before those begin whose events are later
            started.append(connection)
        begun = datetime.now(UTC)
        client.streams.scale(STREAM, split=[0])
        until(
            lambda: look() > begun and "victim" in seen, "a watermark after the scale, and what is written until then"
        )
        kill(process)
        killed = datetime.now(UTC)
        until(lambda: look() > killed, "a watermark after the kill")
        for connection in started[:2]:
            connection.send("stop")
            assert receive(connection) == "done"
        look()
    assert seen == {"one", LATE, "victim"}
