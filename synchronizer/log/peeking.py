"""Read the states of many short logs at once, without opening each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ..errors import CorruptStateError, UnknownUpdateError
from ..state import S, StateCodec
from ..store import SegmentStore
from .entries import decode_entries
from .replica import Replica

#: How many logs one call reads. More take more memory and no less time.
LOGS_AT_ONCE: Final = 500
#: A longer log is opened on its own.
_MAX_LOG_BYTES: Final = 16 * 1024


def peek(store: SegmentStore, logs: Collection[str], codec: StateCodec[S]) -> Mapping[str, Replica[S]]:
    """Return the replicas of these logs, as new as this call, by log.

    Logs that are long, compacted, damaged, written by a newer release or missing are left out: open them one by one,
    which reads them or says what is wrong.
    """
    starts = store.read_starts(logs, _MAX_LOG_BYTES)
    found = {log: _replayed(log, data, codec) for log, data in starts.items() if len(data) < _MAX_LOG_BYTES}
    return {log: replica for log, replica in found.items() if replica is not None}


def _replayed(log: str, data: bytes, codec: StateCodec[S]) -> Replica[S] | None:
    """Return the replica after the whole log ``data``; None if it is damaged, not understood or empty."""
    replica: Replica[S] = Replica()
    try:
        for entry in decode_entries(log, data, 0, 0):
            replica, _ = replica.follow(entry, codec, log)
    except (CorruptStateError, UnknownUpdateError):
        return None
    return replica if data and replica.next_offset == len(data) else None
