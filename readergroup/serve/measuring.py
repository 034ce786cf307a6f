"""Measures the lag of one group again and again, and asks the store only for what may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from synchronizer import Revision

from ..client import Client
from ..group.coordinator import follow_streams
from ..group.lag import GroupLag, LagMemory, group_lag, positions
from ..group.model.state import ReaderGroupState
from ..group.reader_group import ReaderGroup
from ..group.updater import GroupUpdater


class Measured(NamedTuple):
    """A group at one moment."""

    state: ReaderGroupState
    revision: Revision
    lag: GroupLag
    leases: Mapping[str, bytes]


class GroupMeter:
    """Measures one group. For one thread."""

    def __init__(self, client: Client, group: ReaderGroup) -> None:
        self.group = group
        self._clock = client.clock
        self._updater = GroupUpdater(group.synchronizer, client.streams)
        self._memory = LagMemory()
        #: The lengths of the metadata logs of its streams, to wait on.
        self.followed: Mapping[str, int] = {}

    def follow(self) -> None:
        """Bring the state of the group, and what it knows of its streams, up to date."""
        self.followed = follow_streams(self._updater)
        self.group.synchronizer.fetch_updates()

    def measure(self) -> Measured:
        """Measure the lag by the positions that readers have committed."""
        self.followed = follow_streams(self._updater)
        # Leases first: a commit made before a segment changed hands is then in the state fetched after them.
        leases = self._updater.leases()
        synchronizer = self.group.synchronizer
        synchronizer.fetch_updates()
        state, revision = synchronizer.snapshot_of_state
        lag = group_lag(state, positions(state, leases), synchronizer.store, self._clock.time(), self._memory)
        return Measured(state, revision, lag, leases)
