"""The golden files in `tests/wire`: what the first release stores, one file for each stored format.

``UPDATE=1 pytest`` writes a file that does not exist. No test rewrites one: what it holds must stay readable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack

from synchronizer import Revision, State, Update
from synchronizer.state import StateCodec
from tests.places import WIRE

S = TypeVar("S", bound=State)

#: Large data in golden files is this text repeated, so that a text file can hold it in short.
PERIOD: Final = b"0123456789abcdef"


def golden(name: str, written_today: bytes) -> bytes:
    """Return the golden file of this name."""
    path = golden_path(name)
    if is_to_write(path):
        path.write_bytes(written_today)
    return path.read_bytes()


def golden_path(name: str) -> Path:
    return WIRE / name


def is_to_write(path: Path) -> bool:
    return bool(os.environ.get("UPDATE")) and not path.exists()


def check_history(name: str, codec: StateCodec[S], initial: S, updates: Sequence[Update[S]]) -> S:
    """Check the golden history of this name: an initial state, updates, and the state after each. Return the last.

    What it holds is read to these values, written to the same bytes, and applied to the same states.
    """
    states = [initial]
    for number, update in enumerate(updates):
        states.append(update.apply_to(states[-1], Revision(10 * number, 0)))
    entries = [codec.encode_initial(initial), *(codec.encode_updates([update]) for update in updates)]
    today = msgpack.packb([entries, [codec.encode_snapshot(state, 7) for state in states]])
    stored_entries, stored_states = msgpack.unpackb(golden(name, today))
    assert unpacked(stored_entries) == unpacked(entries)
    assert [codec.decode_body(body) for body in stored_entries] == [initial, *([update] for update in updates)]
    assert [codec.decode_snapshot(body)[0] for body in stored_states] == states
    assert unpacked(stored_states) == unpacked(codec.encode_snapshot(state, 7) for state in states)
    return states[-1]


def is_periodic(data: bytes) -> int | None:
    """Return the place in `PERIOD` at which the data begins, if it is large and nothing but that text repeated."""
    if len(data) <= 4 * len(PERIOD):
        return None
    first = (PERIOD * 2).find(data[: len(PERIOD)])
    return None if first < 0 or data != periodic(first, len(data)) else first


def periodic(first: int, length: int) -> bytes:
    return (PERIOD * (length // len(PERIOD) + 2))[first : first + length]


def unpacked(bodies: Iterable[bytes]) -> list[Any]:
    """Return the values in these bodies: a persistent map has no order, so bytes differ from process to process."""
    return [msgpack.unpackb(body, strict_map_key=False) for body in bodies]
