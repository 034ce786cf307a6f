"""The gate of a SQLite file, and processes that wait for it, for tests."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import pytest

from synchronizer.stores.sqlite import commit_slots, shared_commit
from synchronizer.stores.sqlite.file_lock import Gate
from synchronizer.stores.sqlite.store import SqliteStore
from tests.waiting import PATIENCE_SECONDS, until

T = TypeVar("T")


@contextmanager
def held(gate: Gate, timeout: float) -> Iterator[None]:
    try:
        gate.acquire(timeout)
        yield
    finally:
        gate.release()


def is_locked(path: str) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def is_posted(store: SqliteStore) -> bool:
    """Whether the store has a request in its slot."""
    slots = store._slots
    assert slots._own is not None
    return slots._words[slots._base(slots._own) + commit_slots._REQUEST] & commit_slots._FLAGS > 0


def give_slot(store: SqliteStore, gate: Gate, begin_append: Callable[[], Future[T]]) -> list[T]:
    """Make the store wait for the gate, after which it has a slot; return the results of its appends."""
    results: list[T] = []
    while not store._slots.can_post:  # an append that was about to try gets the gate without waiting
        with held(gate, PATIENCE_SECONDS):
            append = begin_append()
            until(lambda: is_locked(f"{store._path}.lock.next"))
        results.append(append.result(PATIENCE_SECONDS))
    return results


@contextmanager
def patient_processes() -> Iterator[None]:
    """A process that waits keeps its request posted, and is taken for alive, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_commit, "_PATIENCE_SECONDS", PATIENCE_SECONDS)
        patch.setattr(commit_slots, "_STALE_MS", int(PATIENCE_SECONDS * 1000))
        yield
