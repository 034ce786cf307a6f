"""Deletes the record of a deleted group."""

from __future__ import annotations

from contextlib import suppress

from synchronizer import AlreadyExistsError, SegmentStore

from .naming import record_segment


def delete_record(store: SegmentStore, group: str, life: bytes) -> None:
    """Delete the record of this life of the group. No process writes to it again: its name is not reused."""
    segment = record_segment(group, life.decode())
    with suppress(AlreadyExistsError):  # an interrupted deletion has deleted it
        store.create(segment)  # the process that named it may not have created it
        store.delete(segment)
