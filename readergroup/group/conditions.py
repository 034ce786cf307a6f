"""The segments of a group in words, for the command line and the web view."""

from __future__ import annotations

from ..words import count
from .model.segment_state import SegmentState


def condition(found: SegmentState | None) -> str:
    """Return what happens to a segment, for people. None: the group has forgotten it."""
    if found is None or found.completed:
        return "completed"
    if found.waiting_for:
        return f"waits for {count(found.waiting_for, 'predecessor')}"
    if found.target is not None:
        return f"going to {found.target}"
    return "being read" if found.owner is not None else "unassigned"
