"""Where in its streams a group begins, and where it continues after a reset."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Literal, cast

from synchronizer import Deadline, InvalidArgumentError, Map

from ..streams.config import SegmentId, StreamCut
from ..streams.data.places import Place
from ..streams.times import cut_at
from .model.checkpoint import Checkpoint
from .model.config import ReaderGroupConfig, Start
from .model.state import FollowedStream, ReaderGroupState, SegmentState
from .model.updates import ResetStream, StreamStart
from .updater import GroupUpdater

if TYPE_CHECKING:  # a list of groups loads no streams
    from ..streams.manager import StreamManager
    from ..streams.state import StreamState

#: A place that a group can be reset to.
ResetTarget = Checkpoint | Mapping[str, StreamCut] | datetime | Literal["head", "tail"]


def initial_state(config: ReaderGroupConfig, streams: StreamManager) -> ReaderGroupState:
    """Return the state of a new group: the segments of its streams from the start cuts on, and no readers."""
    followed = {}
    segments: dict[SegmentId, SegmentState] = {}
    for stream in config.streams:
        start = configured_start(config, stream, streams)
        followed[stream] = FollowedStream(incarnation=start.incarnation, epoch=start.epoch, ended=start.ended)
        segments.update(start.segments)
    return ReaderGroupState(config=config, streams=Map(followed), segments=Map(segments))


def configured_start(
    config: ReaderGroupConfig, stream: str, streams: StreamManager, *, timeout: float | None = None
) -> StreamStart:
    """Return where a group of this config begins to read the stream."""
    metadata = streams.fetch_state(stream, timeout=timeout)
    place: Start = config.start.get(stream, "head")
    if isinstance(place, str) and place not in ("head", "tail"):
        cut = cut_at(streams, stream, datetime.fromisoformat(place), timeout=timeout)
    else:
        cut = streams.resolve(metadata, cast(Place, place), timeout=timeout)
    check_end(config, metadata, streams, timeout=timeout)
    return stream_start(metadata, cut, config.end.get(stream))


def check_end(
    config: ReaderGroupConfig, metadata: StreamState, streams: StreamManager, *, timeout: float | None = None
) -> None:
    """Raise `InvalidArgumentError` if the end of the stream in the config is not between two events of it."""
    if (end := config.end.get(metadata.name)) is not None:
        streams.resolve(metadata, end, timeout=timeout, argument="end")


def stream_start(metadata: StreamState, start: StreamCut, end: StreamCut | None) -> StreamStart:
    """Return a stream as a group begins to read it from ``start`` to ``end``."""
    return StreamStart(
        incarnation=metadata.incarnation,
        epoch=metadata.epoch,
        ended=metadata.sealed or end is not None,
        segments=_segments(metadata, start, end),
    )


def reset(updater: GroupUpdater, to: ResetTarget, *, timeout: float | None = None) -> None:
    """Move the group to ``to``, in all of its streams or in those that ``to`` names."""
    deadline = Deadline(updater.synchronizer.clock, updater.synchronizer.timeout if timeout is None else timeout)
    while not _reset(updater, to, deadline):
        pass  # the streams or bounds changed meanwhile


def _reset(updater: GroupUpdater, to: ResetTarget, deadline: Deadline) -> bool:
    streams, config = updater.streams, updater.synchronizer.fetch_updates(timeout=deadline.remaining()).config
    starts = _starts_at(streams, config, to, deadline)
    partial = len(starts) < len(config.streams)
    resets = []
    for stream, place in starts.items():
        metadata = streams.fetch_state(stream, timeout=deadline.remaining())
        cut = streams.resolve(metadata, place, timeout=deadline.remaining(), argument=f"the place of {stream}")
        start = stream_start(metadata, cut, config.end.get(stream))
        update = ResetStream(
            stream=stream, epoch=start.epoch, ended=start.ended, segments=start.segments, partial=partial
        )
        resets.append((update, metadata))
    return updater.reset_streams(resets, config, timeout=deadline.remaining())


def _starts_at(
    streams: StreamManager, config: ReaderGroupConfig, to: ResetTarget, deadline: Deadline
) -> Mapping[str, Place]:
    if isinstance(to, datetime):
        return {each: cut_at(streams, each, to, timeout=deadline.remaining()) for each in config.streams}
    if isinstance(to, str) and to in ("head", "tail"):
        return dict.fromkeys(config.streams, to)
    cuts = to.cuts if isinstance(to, Checkpoint) else to
    if not isinstance(cuts, Mapping) or not cuts:
        raise InvalidArgumentError("to must be a checkpoint, cuts, a datetime, 'head' or 'tail'")
    for stream in cuts:
        if stream not in config.streams:
            raise InvalidArgumentError(
                "the group does not read this stream; reset it to cuts of its own streams", stream=stream
            )
    return dict(cuts)


def _segments(metadata: StreamState, start: StreamCut, end: StreamCut | None) -> Mapping[SegmentId, SegmentState]:
    """Return the segments from ``start`` to ``end``, each with its predecessors and successors among them."""
    reached = metadata.segments_between(start, end)
    segments = {}
    for segment, predecessors in reached.items():
        keys = metadata.key_range(segment)
        segments[segment] = SegmentState(
            low=keys.low,
            high=keys.high,
            offset=start.offsets.get(segment, 0),
            waiting_for=len(predecessors),
            predecessors=predecessors,
            successors=tuple(after for after in metadata.successors(segment) if after in reached),
            end=None if end is None else end.offsets.get(segment),
        )
    return segments
