"""Change a group's config while it runs, with the streams that it reads and their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from synchronizer import AttributeChange, Deadline, InvalidArgumentError, Proposal, Update
from synchronizer.liveness.lease import lease_attribute, lease_value
from synchronizer.store import MAX_ATTRIBUTE_CHANGES

from ..streams.config import stream_of
from .model.config import ReaderGroupConfig, are_names
from .model.positions import positions
from .model.state import ReaderGroupState
from .model.updates import ConfigureGroup, ConfigureStreams, RecordWeights, StreamStart
from .starting import check_end, configured_start, stream_start
from .updater import GroupUpdater, check_same_stream

if TYPE_CHECKING:  # a list of groups loads no streams
    from ..streams.state import StreamState


def configure(updater: GroupUpdater, changes: Mapping[str, Any]) -> ReaderGroupConfig:
    """Change these fields of the config, and return the new config."""
    synchronizer = updater.synchronizer
    deadline = Deadline(synchronizer.clock, synchronizer.timeout)
    while True:
        before = synchronizer.fetch_updates(timeout=deadline.remaining()).config
        after = _changed(before, changes)
        if _Configuring(updater, before, after, deadline).apply():
            return after


def _changed(before: ReaderGroupConfig, changes: Mapping[str, Any]) -> ReaderGroupConfig:
    """Return the config with these changes. A start is for added streams; the bounds of removed streams go."""
    fields = {**dict(before), **changes}
    streams, start = fields["streams"], changes.get("start", {})
    if not are_names(streams):
        return ReaderGroupConfig(**fields)  # which refuses it
    known = {stream: place for stream, place in before.start.items() if stream in streams}
    if isinstance(start, (str, datetime)):
        start = {stream: start for stream in streams if stream not in before.streams}
        if "streams" not in changes:
            raise _start_of_known()
    fields["start"] = {**known, **start} if isinstance(start, Mapping) else start
    if "end" not in changes:
        fields["end"] = {stream: cut for stream, cut in before.end.items() if stream in streams}
    after = ReaderGroupConfig(**fields)
    for stream in before.streams:
        if stream in after.streams and after.start.get(stream) != before.start.get(stream):
            raise _start_of_known(stream=stream)
    return after


def _start_of_known(**facts: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a start is where an added stream begins; reset the group to move it in a stream that it reads", **facts
    )


class _Configuring:
    """One attempt to replace the config ``before`` with ``after``."""

    def __init__(
        self, updater: GroupUpdater, before: ReaderGroupConfig, after: ReaderGroupConfig, deadline: Deadline
    ) -> None:
        self._updater = updater
        self._before = before
        self._after = after
        self._deadline = deadline
        self._added = [stream for stream in after.streams if stream not in before.streams]
        self._moved = [
            stream
            for stream in after.streams
            if stream in before.streams and after.end.get(stream) != before.end.get(stream)
        ]

    def apply(self) -> bool:
        """Apply the change, and return whether the config was still ``before``."""
        streams, remaining = self._updater.streams, self._deadline.remaining
        added = {each: configured_start(self._after, each, streams, timeout=remaining()) for each in self._added}
        moved = {each: streams.fetch_state(each, timeout=remaining()) for each in self._moved}
        return self._updater.configure(partial(self._propose, added, moved), timeout=remaining())

    def _propose(
        self, added: Mapping[str, StreamStart], moved: Mapping[str, StreamState], state: ReaderGroupState
    ) -> Proposal[ReaderGroupState, bool]:
        if state.config != self._before:
            return Proposal((), False)
        if self._after == self._before:
            return Proposal((), True)
        forgotten: list[Update[ReaderGroupState]] = []
        if self._before.balance == "load" != self._after.balance:
            weights = {segment: 0 for segment, found in sorted(state.segments.items()) if found.weight}
            forgotten = [RecordWeights(weights=weights)] if weights else []
        if all(getattr(self._after, field) == getattr(self._before, field) for field in ("streams", "start", "end")):
            return Proposal([*forgotten, ConfigureGroup(config=self._after)], True)
        if any(metadata.epoch < state.streams[stream].epoch for stream, metadata in moved.items()):
            return Proposal((), False)  # scaled since it was fetched
        found, attributes = self._moved_starts(state, moved)
        update = ConfigureStreams(config=self._after, starts={**added, **found} or None)
        return Proposal([*forgotten, update], True, attributes)

    def _moved_starts(
        self, state: ReaderGroupState, moved: Mapping[str, StreamState]
    ) -> tuple[Mapping[str, StreamStart], Mapping[str, AttributeChange]]:
        """Return these streams from the committed positions on, and the condition that nothing is committed meanwhile.

        Of more readers than one append can check, events that were committed meanwhile come again.
        """
        owners = {found.owner for segment, found in state.segments.items() if stream_of(segment) in moved}
        readers = [found for reader, found in state.readers.items() if reader in owners and found.lease is not None]
        leases = self._updater.leases(readers) if readers else {}
        offsets = positions(state, leases)
        starts = {}
        for stream, metadata in moved.items():
            check_same_stream(metadata, state.streams[stream].incarnation)
            here = {segment: offsets[segment] for segment in state.offsets if stream_of(segment) == stream}
            cut = self._updater.streams.resolve(metadata, state.cuts_at(here)[stream])
            check_end(self._after, metadata, self._updater.streams)
            starts[stream] = stream_start(metadata, cut, self._after.end.get(stream))
        values = ((lease_attribute(str(found.lease)), lease_value(found, leases)) for found in readers)
        unchanged = {name: AttributeChange(value, value) for name, value in values if value is not None}
        return starts, dict(islice(unchanged.items(), MAX_ATTRIBUTE_CHANGES - 2))
