"""What the log of a shared state says without its classes: updates, and the value of the last snapshot."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple

import msgpack

from synchronizer import Revision, SegmentStore, TruncatedError
from synchronizer.log.entries import Entry, EntryLog, previous_of

from .kinds import is_collection

_HEADER_BYTES: Final = 64


class LoggedUpdate(NamedTuple):
    """An update in the log."""

    revision: Revision
    #: The process that wrote it. Every synchronizer has an id of its own.
    writer: str
    update: str
    fields: Mapping[str, Any]


class History(NamedTuple):
    """The last updates of a state."""

    updates: Sequence[LoggedUpdate]
    #: How many earlier ones the log has.
    earlier: int


class LastSnapshot(NamedTuple):
    """The value of a state without its classes."""

    fields: Mapping[str, Any]
    #: Whether it is that of a snapshot; else the state began so.
    is_snapshot: bool
    #: How many entries of the log came later.
    entries_since: int


def history_of(store: SegmentStore, name: str, limit: int) -> History:
    """Return the last updates that the log still has. Raise `NotFoundError` if there is no such state."""
    kept: deque[LoggedUpdate] = deque(maxlen=limit)
    total = 0
    for entry in entries_of(store, name):
        for update in _updates(entry, in_collection=is_collection(name)):
            kept.append(update)
            total += 1
    return History(tuple(kept), total - len(kept))


def last_snapshot(store: SegmentStore, name: str) -> LastSnapshot:
    """Return the value of the last snapshot, or the first one. Raise `NotFoundError` if there is no such state."""
    entries = list(entries_of(store, name))
    log = EntryLog(store, name)
    mark = log.mark()
    after = sum(1 for each in entries if mark is None or each.offset >= mark.next_offset)
    fields: Mapping[str, Any] = {}
    if mark is not None:
        fields = msgpack.unpackb(log.read_snapshot(mark), strict_map_key=False)[3] or {}
    elif entries:
        fields = next(_updates(entries[0], in_collection=False)).fields
        after -= 1
    return LastSnapshot(readable(fields, in_collection=False), mark is not None, after)


def entries_of(store: SegmentStore, name: str) -> Iterator[Entry]:
    """Iterate over the entries that the log still has."""
    log = EntryLog(store, name)
    at = store.info(name).start_offset
    previous = previous_of(store.read(name, at, _HEADER_BYTES))
    while True:
        try:
            entries, is_all = log.read(at, previous)
        except TruncatedError as error:  # compacted meanwhile
            at = error.start_offset
            previous = previous_of(store.read(name, at, _HEADER_BYTES))
            continue
        yield from entries
        if is_all or not entries:
            return
        at, previous = entries[-1].end, entries[-1].checksum


def _updates(entry: Entry, *, in_collection: bool) -> Iterator[LoggedUpdate]:
    kind, *rest = msgpack.unpackb(entry.body, strict_map_key=False)
    writer = entry.writer_id.hex()
    first = Revision(entry.offset, 0)
    match kind:
        case "u":
            for index, (tag, fields) in enumerate(rest[1]):
                shown = readable(fields, in_collection=in_collection)
                yield LoggedUpdate(Revision(entry.offset, index), writer, tag, shown)
        case "i":
            fields = readable(rest[1], in_collection=in_collection)
            yield LoggedUpdate(first, writer, "(initial state)", fields)
        case "d":
            yield LoggedUpdate(first, writer, "(deleted)", {})
        case _:
            yield LoggedUpdate(first, writer, f"({kind}, of a newer release)", {})


def readable(value: Any, *, in_collection: bool) -> Any:
    """Return the value with text in place of bytes, in a form that JSON has, as far as it is not nested too deeply."""
    try:
        return _readable(value, in_collection=in_collection)
    except RecursionError:  # at the innermost level that can be shown
        return "..."


def _readable(value: Any, *, in_collection: bool) -> Any:
    match value:
        case bytes():
            if in_collection:
                return readable(msgpack.unpackb(value, strict_map_key=False), in_collection=False)
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case Mapping():
            return {
                key if isinstance(key, str) else str(readable(key, in_collection=in_collection)): readable(
                    each, in_collection=in_collection
                )
                for key, each in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [readable(each, in_collection=in_collection) for each in value]
        case float() if not isfinite(value):  # JSON has no such number
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)
