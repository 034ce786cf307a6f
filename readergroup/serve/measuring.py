"""Measures the lag of one group again and again, and asks the store only for what may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from synchronizer import Revision
from synchronizer.clock import stopwatch
from synchronizer.counting import Latencies

from ..client import Client
from ..group.lag import GroupLag, LagMemory, StoredSegment, group_lag
from ..group.model.positions import positions
from ..group.model.state import ReaderGroupState
from ..group.reader_group import ReaderGroup
from ..group.updater import GroupUpdater
from ..streams.config import SegmentId


class Measured(NamedTuple):
    """A group at one moment."""

    state: ReaderGroupState
    revision: Revision
    lag: GroupLag
    leases: Mapping[str, bytes]
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
        return Measured(state, revision, lag, leases, offsets, self._memory.stored())
