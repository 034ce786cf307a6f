"""Deletes the record of a group that is deleted."""

from __future__ import annotations

from contextlib import suppress

from synchronizer import AlreadyExistsError, SegmentStore

from .entries import record_segment


def delete_record(store: SegmentStore, group: str, life: bytes) -> None:
    """Delete the record of this life. Nobody writes to it from now on: its name is not used again."""
    segment = record_segment(group, life.decode())
    with suppress(AlreadyExistsError):  # a deletion that was cut off has done it
        store.create(segment)  # whoever named it may not have come to that
        store.delete(segment)
