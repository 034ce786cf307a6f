"""Measures the lag of one group again and again, and asks the store only for what may have changed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from synchronizer import Revision
from synchronizer.clock import stopwatch
from synchronizer.counting import Latencies
from synchronizer.liveness.lease import lease_value

from ..client import Client
from ..group.lag import GroupLag, LagMemory, StoredSegment, group_lag
from ..group.model.positions import positions
from ..group.model.state import ReaderGroupState
from ..group.reader_group import ReaderGroup
from ..group.updater import GroupUpdater
from ..streams.config import SegmentId

#: When, on the clock, the lease of a reader that has one was seen to change, or was seen first; by reader and
#: incarnation.
RenewedAt = Mapping[tuple[str, int], float]


class Measured(NamedTuple):
    """A group at one moment."""

    state: ReaderGroupState
    revision: Revision
    lag: GroupLag
    renewed_at: RenewedAt
    #: Where the group stands in each segment.
    positions: Mapping[SegmentId, int]
    stored: Mapping[SegmentId, StoredSegment]


class GroupMeter:
    """Measures one group. For one thread. Adds to ``fetches`` how long the reads of the group's log take."""

    def __init__(self, client: Client, group: ReaderGroup, fetches: Latencies | None = None) -> None:
        self.group = group
        self._fetches = fetches
        self._clock = client.clock
        self._updater = GroupUpdater(group.synchronizer, client.streams)
        self._memory = LagMemory()
        #: By reader and incarnation: its lease, and when that was first seen.
        self._seen_leases: Mapping[tuple[str, int], tuple[bytes | None, float]] = {}
        #: The lengths of the metadata logs of its streams, to wait on.
        self.followed: Mapping[str, int] = {}

    def follow(self) -> None:
        """Bring the state of the group, and what it knows of its streams, up to date."""
        self.followed = self._updater.follow_streams()
        self.group.synchronizer.fetch_updates()

    def measure(self) -> Measured:
        """Measure the lag by the positions that readers have committed. Raise `NotFoundError` as `ReaderGroup.lag`."""
        self.followed = self._updater.follow_streams(strict=True)
        # Leases first: a commit made before a segment changed hands is then in the state fetched after them.
        leases = self._updater.leases()
        synchronizer = self.group.synchronizer
        began = stopwatch()
        synchronizer.fetch_updates()
        if self._fetches is not None:
            self._fetches.add(stopwatch() - began)
        state, revision = synchronizer.snapshot_of_state
        offsets = positions(state, leases)
        lag = group_lag(state, offsets, synchronizer.store, self._clock.time(), self._memory)
        return Measured(state, revision, lag, self._see(state, leases), offsets, self._memory.stored())

    def _see(self, state: ReaderGroupState, leases: Mapping[str, bytes]) -> RenewedAt:
        """Return when the lease of each reader was seen to change."""
        now = self._clock.monotonic()
        seen = {}
        for reader, found in state.readers.items():
            if found.lease is not None:
                key, value = (reader, found.incarnation), lease_value(found, leases)
                before = self._seen_leases.get(key)
                seen[key] = before if before is not None and before[0] == value else (value, now)
        self._seen_leases = seen
        return {key: since for key, (_, since) in seen.items()}


def silent_seconds(state: ReaderGroupState, renewed_at: RenewedAt, now: float) -> Mapping[str, float]:
    """Return how long the lease of each reader that has one has not changed."""
    return {
        reader: now - renewed_at.get((reader, found.incarnation), now)
        for reader, found in state.readers.items()
        if found.lease is not None
    }


def expired(state: ReaderGroupState, silent: Mapping[str, float]) -> Set[str]:
    """Return the readers that have been silent for so long that other readers would declare them dead."""
    return {reader for reader, seconds in silent.items() if seconds > state.config.reader_timeout_seconds}
