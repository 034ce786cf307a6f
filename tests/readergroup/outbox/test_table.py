"""A relay takes the first rows of a stream, and SQLite reads and writes the data of no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from readergroup.outbox.session import Session
from readergroup.outbox.table import OutboxTable
from tests.readergroup.outbox.databases import KINDS, connect_to, place_of

STREAM = "shop/orders"
OTHER = "shop/other"
TABLE = OutboxTable("outbox")
IO_OF_THREAD = Path("/proc/thread-self/io")
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def session(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Iterator[Session]:
    with closing(Session(connect_to(kind, place_of(kind, request, tmp_path)))) as session:
        TABLE.create(session)
        TABLE.prepare_to_relay(session)
        yield session


def write(session: Session, stream: str, *sizes: int) -> None:
    for size in sizes:
        row = {"stream": stream, "data": bytes(size)}
        session.execute("INSERT INTO outbox (stream, routing_key, data) VALUES (:stream, 'ann', :data)", row)


def transferred_bytes(call: Callable[[], object]) -> int:
    """What this thread reads and writes in the call, also into temporary files."""
    before = _transferred_bytes()
    call()
    return _transferred_bytes() - before


def _transferred_bytes() -> int:
    counts = dict(line.split(": ") for line in IO_OF_THREAD.read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


@each_kind
@pytest.mark.parametrize(
    "at_most, bytes_at_most, without, sizes",
    [
        (9, 100, 0, [3, 0, 5, 10, 1]),
        (9, 9, 0, [3, 0, 5, 10]),  # the last one exceeds the limit
        (9, 8, 0, [3, 0, 5]),
        (9, 1, 0, [3]),  # at least one
        (4, 100, 0, [3, 0, 5, 10]),
        (4, 100, 2, [5, 10, 1]),
        (2, 100, 2, [5, 10]),
        (9, 5, 2, [5]),
        (9, 100, 5, []),
    ],
)
def test_the_first_rows_are_those_within_the_limits(
    session: Session, kind: str, at_most: int, bytes_at_most: int, without: int, sizes: list[int]
) -> None:
    for size in (3, 0, 5, 10, 1):
        write(session, OTHER, 7)
        write(session, STREAM, size)
    named = [row.id for row in TABLE.rows(session, STREAM, [], without, 1000)]
    rows = TABLE.rows(session, STREAM, named, at_most, bytes_at_most)
    assert [len(row.data) for row in rows] == sizes
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert all(row.seconds is not None and 0 <= row.seconds < 60 for row in rows[:1])


@each_kind
def test_the_lag_of_each_stream_is_the_age_of_its_first_row(session: Session, kind: str) -> None:
    write(session, OTHER, 1)
    write(session, STREAM, 1, 1)
    long_ago = {"written_at": "2001-01-01", "stream": OTHER}
    session.execute("UPDATE outbox SET written_at = :written_at WHERE stream = :stream", long_ago)
    orders, other = TABLE.lag(session)
    assert (orders.stream, orders.events) == (STREAM, 2) and orders.seconds < 60
    assert (other.stream, other.events) == (OTHER, 1) and other.seconds > 600_000_000


@pytest.mark.skipif(not IO_OF_THREAD.exists(), reason="the system does not count what a thread reads and writes")
@pytest.mark.parametrize("kind", ["sqlite"])
def test_sqlite_transfers_no_data_of_rows_that_are_not_taken(session: Session, kind: str) -> None:
    megabyte = 1_000_000
    write(session, STREAM, *[megabyte] * 30)
    assert transferred_bytes(lambda: TABLE.rows(session, STREAM, [1], 5000, 3 * megabyte)) < 4 * megabyte
    assert transferred_bytes(lambda: TABLE.lag(session)) < 2 * megabyte
