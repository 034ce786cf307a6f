"""Notifications and segments of a group in words, for the command line and the web view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notifications import Notification

from .notifiers import (
    CheckpointNotification,
    EndOfDataNotification,
    ReaderNotification,
    RetentionNotification,
    SegmentNotification,
)

if TYPE_CHECKING:
    from .model.segment_state import SegmentState


def words(notification: Notification) -> str:
    """Return the notification in a line, for people."""
    match notification:
        case SegmentNotification():
            return f"segments: {notification.number_of_segments:,} to read"
        case ReaderNotification():
            changes = [f"{reader} joined" for reader in notification.joined]
            changes += [
                f"{reader} {'was declared dead' if reader in notification.dead else 'left'}"
                for reader in notification.left
            ]
            return f"readers: {', '.join([*changes, f'{len(notification.readers):,} in the group'])}"
        case CheckpointNotification():
            changes = [f"{each.name} completed" for each in notification.completed]
            changes += [f"{name} given up" for name in notification.failed]
            return f"checkpoints: {', '.join(changes) or 'none yet'}"
        case EndOfDataNotification():
            return f"end of data: {'; '.join(map(str, notification.cuts.values()))}"
        case RetentionNotification():
            return (
                f"deleted before they were consumed: events before {'; '.join(map(str, notification.heads.values()))}"
            )
        case _:
            return f"{type(notification).__name__}: {notification.cause}"


def condition(found: SegmentState | None) -> str:
    """Return what happens to a segment, for people. None: the group has forgotten it."""
    if found is None or found.completed:
        return "completed"
    if found.waiting_for:
        return f"waits for {found.waiting_for:,} predecessor{'s' * (found.waiting_for > 1)}"
    if found.target is not None:
        return f"going to {found.target}"
    return "being read" if found.owner is not None else "unassigned"
