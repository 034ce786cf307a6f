"""Read the states of many short logs at once, without opening each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from ..errors import CorruptStateError, UnknownUpdateError
from ..state import S, StateCodec
from ..store import SegmentStart, SegmentStore
from .entries import decode_entries
from .replica import Replica

#: How many logs one call reads. More take more memory and no less time.
LOGS_AT_ONCE: Final = 500
#: A longer log is opened on its own.
_MAX_LOG_BYTES: Final = 16 * 1024


def peek(store: SegmentStore, logs: Collection[str], codec: StateCodec[S]) -> Iterator[tuple[str, Replica[S] | None]]:
    """Read these logs, and return an iterator over them with the replica of each, as new as this call.

    Logs that are long, compacted, damaged, written by a newer release or missing have None: open them one by one, which
    reads them or says what is wrong. A replica is made when it is asked for: if many lived at once, Python's garbage
    collector would look through them again and again.
    """
    starts = store.read_starts(logs, _MAX_LOG_BYTES)
    return ((log, _replayed(log, starts[log], codec) if log in starts else None) for log in logs)


def _replayed(log: str, start: SegmentStart, codec: StateCodec[S]) -> Replica[S] | None:
    """Return the replica after the whole log; None if it is long, compacted, damaged, not understood or empty."""
    offset, data = start
    if not 0 < len(data) < _MAX_LOG_BYTES:
        return None
    replica: Replica[S] = Replica(next_offset=offset)
    try:
        for entry in decode_entries(log, data, offset, 0):
            replica, _ = replica.follow(entry, codec, log)
    except (CorruptStateError, UnknownUpdateError):
        return None
    return replica if replica.next_offset == offset + len(data) else None
