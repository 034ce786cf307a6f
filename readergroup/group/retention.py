"""How far a subscribed group has consumed its streams: what a retention policy keeps for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..streams.config import SegmentId, StreamCut, number_of, stream_of
from ..streams.retention.consumed import Consumed
from .model.state import ReaderGroupState
from .model.updates import NoteSkipped


def consumed_by(state: ReaderGroupState, offsets: Mapping[SegmentId, int]) -> Mapping[str, Consumed]:
    """Return how far the group has consumed each stream that it subscribes to. ``offsets`` are committed positions."""
    kind = state.config.retention
    found: dict[str, Consumed] = {}
    if kind == "NONE":
        return found
    released: Mapping[str, StreamCut] | None = None
    if kind == "MANUAL":
        released = state.retention_cuts or {}
    elif kind == "AT_LAST_CHECKPOINT":
        last = state.completed_checkpoints[-1:]
        released = state.cuts_at(last[0].offsets) if last else {}
    for stream, at in state.cuts_at({segment: offsets[segment] for segment in state.offsets}).items():
        is_finished = state.streams[stream].ended and all(
            found.completed for segment, found in state.segments.items() if stream_of(segment) == stream
        )
        if is_finished:
            continue
        if released is None:
            cuts = [at]
        else:  # the group may have been reset to an earlier place since
            cuts = [released[stream], at] if stream in released else []
        found[stream] = Consumed(state.streams[stream].incarnation, cuts)
    return found


def note_skipped(state: ReaderGroupState, head: StreamCut, reached: Mapping[SegmentId, int]) -> Iterable[NoteSkipped]:
    """Return the update that notes the deletion of events before ``head``.

    There is none while an earlier note stands that the group, with what it has ``reached``, has not read beyond.
    """
    followed = state.streams.get(head.stream)
    if followed is None or followed.incarnation != head.incarnation:
        return []
    known = None if state.skipped is None else state.skipped.get(head.stream)
    if known is not None:
        read = {segment: reached[segment] for segment in state.offsets if segment in reached}
        if known == head or not _is_beyond(read, known):
            return []
    return [NoteSkipped(head=head)]


def _is_beyond(reached: Mapping[SegmentId, int], cut: StreamCut) -> bool:
    newest = max(map(number_of, cut.offsets))
    return any(
        offset > cut.offsets[segment] if segment in cut.offsets else number_of(segment) > newest
        for segment, offset in reached.items()
        if stream_of(segment) == cut.stream
    )
