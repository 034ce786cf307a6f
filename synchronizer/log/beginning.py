"""The first entry of a log: it begins a state. A store that can creates the log with it in one step.

So a log in such a store has an entry at its start, or a snapshot: one that has neither was damaged.
"""

from __future__ import annotations

import secrets

from ..errors import StateTooLargeError
from ..state import S, StateCodec
from ..store import MAX_CREATED_BYTES, SegmentStore
from .entries import encode_entry


def first_entry(log: str, state: S, codec: StateCodec[S], limit: int) -> bytes:
    """Return the bytes of a log that begins with ``state``. Raise `StateTooLargeError` if it exceeds the limit."""
    body = codec.encode_initial(state)
    codec.read_back(body, [state])
    if len(body) > limit and (size := codec.size(state)) > limit:
        raise too_large(log, size, limit)
    data, _ = encode_entry(secrets.token_bytes(8), 1, 0, body)
    return data


def first_entry_of_nothing(codec: StateCodec[S]) -> bytes:
    """Return the bytes of a log whose state is yet to begin, because it is too large to create the log with it."""
    data, _ = encode_entry(secrets.token_bytes(8), 1, 0, codec.encode_tombstone())
    return data


def begins_in_one_step(store: SegmentStore, data: bytes) -> bool:
    """Return whether the store can create a log with these bytes."""
    return store.guarantees.atomic_multi_create and len(data) <= MAX_CREATED_BYTES


def too_large(log: str, size: int, limit: int) -> StateTooLargeError:
    return StateTooLargeError(
        "the state would exceed its limit; remove something first, or open it with a higher state_limit_bytes",
        segment=log,
        bytes=size,
        limit=limit,
    )
