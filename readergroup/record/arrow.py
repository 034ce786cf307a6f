"""Turns recorded notifications into Arrow: one row each, with the same columns for all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from notifications import Notification
from synchronizer import UnsupportedError
from synchronizer.extras import install_hint

from ..group.notifiers import EndOfDataNotification, ReaderNotification, SegmentNotification
from .entries import LagSample, kind_of

try:
    import pyarrow
except ImportError as error:
    raise UnsupportedError(f"Arrow is not installed; {install_hint('arrow')}") from error

#: The most rows in one record batch.
MAX_ROWS: Final = 8192

_NAMES: Final = pyarrow.list_(pyarrow.string())
#: The columns of every table of notifications. Columns that a kind does not have are null.
SCHEMA: Final = pyarrow.schema(
    {
        "seen_at": pyarrow.timestamp("us", "UTC"),  # by the clock of the recording process
        "group": pyarrow.string(),
        "revision": pyarrow.int64(),  # of the group's state: `Revision.offset` and, in the next column, `.index`
        "index": pyarrow.int64(),
        "offset": pyarrow.int64(),  # in the record: unique, and grows from row to row
        "kind": pyarrow.string(),  # one of `entries.KINDS`
        "cause": pyarrow.string(),
        "gap": pyarrow.bool_(),
        "number_of_segments": pyarrow.int64(),
        "number_of_readers": pyarrow.int64(),
        "segments": _NAMES,
        "readers": _NAMES,
        "joined": _NAMES,
        "left": _NAMES,
        "dead": _NAMES,
        "cuts": pyarrow.string(),  # at the end of the data, as JSON
        "backlog_bytes": pyarrow.int64(),
        "backlog_events": pyarrow.int64(),
        "backlog_seconds": pyarrow.float64(),
    }
)


def record_batches(entries: Iterable[tuple[int, Notification]]) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the rows of these notifications, which come with their offsets."""
    rows = (_row(offset, notification) for offset, notification in entries)
    while part := list(islice(rows, MAX_ROWS)):
        yield pyarrow.RecordBatch.from_pylist(part, schema=SCHEMA)


def table(entries: Iterable[tuple[int, Notification]]) -> pyarrow.Table:
    return pyarrow.Table.from_batches(record_batches(entries), schema=SCHEMA)


def _row(offset: int, notification: Notification) -> Mapping[str, Any]:
    change = notification.change
    return {
        "seen_at": change.seen_at,
        "group": change.source,
        "revision": change.revision.offset,
        "index": change.revision.index,
        "offset": offset,
        "kind": kind_of(notification),
        "cause": change.cause,
        "gap": change.gap,
        **_own_columns(notification),
    }


def _own_columns(notification: Notification) -> Mapping[str, Any]:
    match notification:
        case SegmentNotification():
            return notification.model_dump(exclude={"change"})
        case ReaderNotification():
            return {"number_of_readers": len(notification.readers), **notification.model_dump(exclude={"change"})}
        case EndOfDataNotification():
            return {"cuts": notification.model_dump_json(include={"cuts"}).removeprefix('{"cuts":').removesuffix("}")}
        case LagSample():
            return {
                "number_of_segments": notification.number_of_segments,
                "number_of_readers": notification.number_of_readers,
                "backlog_bytes": notification.bytes,
                "backlog_events": notification.events,
                "backlog_seconds": notification.seconds,
            }
    raise AssertionError(notification)
