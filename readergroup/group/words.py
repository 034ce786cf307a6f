"""Notifications of a group in words, for the command line and the web view."""

from __future__ import annotations

from notifications import Notification

from .notifiers import (
    CheckpointNotification,
    EndOfDataNotification,
    ReaderNotification,
    RetentionNotification,
    SegmentNotification,
)


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
