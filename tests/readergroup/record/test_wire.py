"""The record of notifications is written and read as in the first release: `tests/wire/notification-record-*`."""

from __future__ import annotations

from datetime import UTC, datetime

import readergroup as rg
from readergroup.record.entries import KINDS, LagSample, RecordRange, encode_entry, encode_notification
from readergroup.record.record import entries
from readergroup.record.recorder import Recorded
from readergroup.streams.config import SegmentId
from synchronizer import open_store
from tests.golden import golden

AT = datetime(2026, 3, 1, 12, 30, 15, 123456, UTC)


def change(offset: int, index: int, cause: str, *, gap: bool = False) -> rg.Change:
    return rg.Change(source="billing", revision=rg.Revision(offset, index), cause=cause, seen_at=AT, gap=gap)


EVERY_KIND: list[rg.Notification] = [
    rg.SegmentNotification(
        change=change(0, 0, "present value"),
        number_of_segments=2,
        number_of_readers=1,
        segments=(SegmentId("shop/orders/0"), SegmentId("shop/orders/1")),
    ),
    rg.ReaderNotification(change=change(0, 0, "present value"), readers=("r1",), joined=("r1",)),
    rg.ReaderNotification(change=change(120, 2, "remove_reader, add_reader"), readers=()),
    rg.ReaderNotification(
        change=change(400, 0, "several changes", gap=True), readers=("r2",), joined=("r2",), left=("r1",), dead=("r1",)
    ),
    LagSample(
        change=change(400, 0, "sample"),
        number_of_segments=2,
        number_of_readers=1,
        bytes=70_000,
        events=700,
        seconds=1.5,
    ),
    rg.EndOfDataNotification(
        change=change(2**40, 1, "complete"),
        cuts={
            "shop/orders": rg.StreamCut(
                stream="shop/orders",
                offsets={SegmentId("shop/orders/0"): 7, SegmentId("shop/orders/1"): 9},
                incarnation="i",
            )
        },
    ),
]


def test_notifications_are_recorded_and_read_as_in_the_first_release() -> None:
    today = encode_entry(list(map(encode_notification, EVERY_KIND)), AT)
    stored = golden("notification-record-v1.bin", today)
    assert stored == today
    within = RecordRange(group="billing", life="abc", start=0, end=len(stored))
    assert within.segment == "record/billing/abc"
    with open_store("memory://") as store:
        store.create(within.segment)
        store.append(within.segment, stored)
        found = [each for _, each in entries(store, within)]
    assert found == EVERY_KIND
    for kind in KINDS.values():  # what is equal to its default is not stored
        stored_fields = {name for each in found if type(each) is kind for name in each.model_fields_set}
        assert stored_fields == kind.model_fields.keys(), kind


def test_how_far_a_record_goes_is_written_and_read_as_in_the_first_release() -> None:
    recorded = Recorded(rg.Revision(2**40, 3), 12)
    today = recorded.encode()
    assert today is not None
    stored = golden("notification-record-end-v1.msgpack", today)
    assert stored == today
    assert Recorded.decode(stored) == recorded
    assert Recorded.decode(None) == Recorded() and Recorded().encode() is None
