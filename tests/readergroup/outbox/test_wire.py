"""What outboxes store is written and read as in the first release."""

from __future__ import annotations

import json

import pytest

import readergroup as rg
from readergroup.outbox.publishing import Published, checksum
from readergroup.outbox.state import OUTBOX_UPDATES, OutboxState, ReportMoving, ReportStuck
from readergroup.outbox.table import OutboxTable, Row
from synchronizer.state import StateCodec
from tests.golden import check_history, golden


def test_the_state_is_written_and_read_as_in_the_first_release() -> None:
    updates = [
        ReportStuck(stream="shop/orders", reason="no stream"),
        ReportStuck(stream="shop/bills", reason="sealed"),
        ReportMoving(stream="shop/orders"),
        ReportMoving(stream="shop/orders"),
    ]
    last = check_history("outbox-history-v1.msgpack", StateCodec(OutboxState, OUTBOX_UPDATES), OutboxState(), updates)
    assert dict(last.stuck) == {"shop/bills": "sealed"}


def test_what_a_segment_has_of_an_outbox_is_written_and_read_as_in_the_first_release() -> None:
    rows = [Row(7, None, b"seven", None), Row(8, "ann", b"eight", None), Row(10**12, "b\u00f6b", b"", {"a": b""})]
    published = Published(3, 5, {row.id: checksum(row) for row in rows})
    stored = golden("outbox-published-v1.msgpack", published.encode())
    assert stored == published.encode()
    assert Published.decode(stored) == published
    with pytest.raises(rg.UnsupportedError, match="a newer release"):
        Published.decode(stored.replace(b"\x95\x01", b"\x95\x02", 1))


def test_the_table_is_defined_as_in_the_first_release() -> None:
    today = {dialect: OutboxTable("outbox").ddl(dialect) for dialect in ("postgresql", "sqlite")}
    assert json.loads(golden("outbox-table-v1.json", json.dumps(today, indent=1).encode())) == today
