"""Appends and their results as bytes, for the process that commits them for another one."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgpack

from synchronizer.errors import ReaderGroupError
from synchronizer.store import ANY, Append, Appended, AppendResult, AttributeChange, Conflict

from . import steps as sqlite_steps

#: The largest append that another process may commit: one with its names and attributes has room in a slot.
MAX_BYTES: Final = 60_000
#: No segment is so long: its length is a signed integer of 64 bits.
_LONGER_THAN_ANY: Final = 1 << 63
#: Each answer takes less than 32 bytes if the append was written, so the answers always have room.
MAX_APPENDS: Final = 64

_data: Final = attrgetter("data")

Result = AppendResult | tuple[Appended, ...] | Mapping[str, Conflict]


class Request(NamedTuple):
    """The appends of one call: together, or the only one."""

    appends: Sequence[Append]
    is_together: bool

    @property
    def weight(self) -> int:
        """How many bytes the appends put into the file."""
        total = 0
        for append in self.appends:
            total += len(append.data)
            for change in append.attributes.values():
                total += len(change.new or b"")
        return total

    @property
    def wakes(self) -> bool:
        """Whether a thread or process may be waiting for the change."""
        # Appends without data are mostly lease renewals, which no process waits for.
        return any(map(_data, self.appends))

    def run(self, connection: sqlite3.Connection) -> Result:
        if self.is_together:
            return sqlite_steps.append_together(connection, self.appends)
        return sqlite_steps.append(connection, self.appends[0])


def encode(request: Request) -> bytes:
    encoded: bytes = msgpack.packb([request.is_together, [_encode(append) for append in request.appends]])
    return encoded


def decode(requests: bytes) -> list[Request]:
    """Return the requests, which `encode` turned into bytes, one after the other."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(requests))
    unpacker.feed(requests)
    return [Request([_decode(*each) for each in appends], together) for together, appends in unpacker]


def _encode(append: Append) -> list[Any]:
    changes = {
        name: [True if change.expected is ANY else change.expected, change.new]
        for name, change in append.attributes.items()
    }
    offset = append.expected_offset
    if offset is not None:
        offset = min(offset, _LONGER_THAN_ANY)  # the number may be too large for msgpack
    return [append.segment, append.data, offset, changes]


def _decode(segment: str, data: bytes, expected_offset: int | None, changes: Mapping[str, Any]) -> Append:
    attributes = {
        name: AttributeChange(ANY if expected is True else expected, new) for name, (expected, new) in changes.items()
    }
    return Append(segment, data, expected_offset, attributes)


def answer(connection: sqlite3.Connection, requests: Sequence[Request], max_bytes: int) -> bytes:
    """Run the requests and return their results, at most ``max_bytes``.

    An error, and a conflict that is too large, is left out: nothing was written, and the other process runs the
    request again itself.
    """
    answers: list[Any] = []
    room = max_bytes - 32 * MAX_APPENDS
    for request in requests:
        try:
            encoded = _encode_result(request.run(connection))
        except ReaderGroupError:
            encoded = None
        if encoded is not None and encoded[0] in _CONFLICTS:
            size = len(msgpack.packb(encoded))
            if size > room:
                encoded = None
            else:
                room -= size
        answers.append(encoded)
    packed: bytes = msgpack.packb(answers)
    return packed


_APPENDED, _CONFLICT, _ALL_APPENDED, _SOME_CONFLICTS = range(4)
_CONFLICTS: Final = (_CONFLICT, _SOME_CONFLICTS)


def _encode_result(result: object) -> list[Any]:
    match result:
        case Appended(offset, end):
            return [_APPENDED, offset, end]
        case Conflict(length, delta, attributes):
            return [_CONFLICT, length, delta, attributes]
        case tuple():
            return [_ALL_APPENDED, [[each.offset, each.length] for each in result]]
        case Mapping():
            return [
                _SOME_CONFLICTS,
                {name: [each.length, each.delta, each.attributes] for name, each in result.items()},
            ]
    raise AssertionError(result)


def decode_answers(data: bytes) -> list[Result | None]:
    """Return the results; None for a request that must be run again."""
    return [None if each is None else _decode_result(*each) for each in msgpack.unpackb(data)]


def _decode_result(kind: int, *fields: Any) -> Result:
    if kind == _APPENDED:
        return Appended(*fields)
    if kind == _CONFLICT:
        return Conflict(*fields)
    if kind == _ALL_APPENDED:
        return tuple(Appended(*each) for each in fields[0])
    return {name: Conflict(*each) for name, each in fields[0].items()}
