"""The gate of a SQLite file in a ``with`` block, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from synchronizer.stores.sqlite.file_lock import Gate


@contextmanager
def held(gate: Gate, timeout: float) -> Iterator[None]:
    try:
        gate.acquire(timeout)
        yield
    finally:
        gate.release()
