"""Presents a streaming query as a reader of a group, so that tools for groups see the query too.

The query reads by its own cuts, not by assignments of the group. So its reader is exclusive: it is alone in the group,
owns all readable segments, and commits the position of the query.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from typing import Final

from synchronizer import InvalidArgumentError, ReaderGroupError
from synchronizer.liveness.lease import Lease
from synchronizer.liveness.timing import RENEWALS
from synchronizer.loggers import get_logger

from ..client import Client
from ..errors import ReaderNotInGroupError
from ..group.coordinator import ReaderCoordinator
from ..group.model.positions import Positions, SegmentPosition
from ..group.model.state import ReaderGroupState
from ..group.starting import reset
from ..group.updater import GroupUpdater
from ..streams.config import StreamCut
from ..streams.state import StreamState
from .retention import moved_to_data

logger = get_logger("readergroup.spark")

#: The id of the reader. A restarted query replaces its former reader.
READER: Final = "spark"
#: How long the reader tries to leave the group.
_LEAVE_SECONDS: Final = 5.0


class PublishedPositions:
    """The reader of a query in the group that publishes the query's positions. Close it when the query ends.

    Raises if the group does not exist, reads anything but this stream, or has other readers. Later failures of the
    store are logged and retried. Once the reader has lost its place in the group, `publish` and `catch_up` raise
    `ReaderNotInGroupError`, which ends the query: another query may read the same events by then.
    """

    reader_id = READER
    keeps_checkpoints = False

    def __init__(self, client: Client, group: str, stream: str) -> None:
        found = client.groups.get(group)
        if found.config.streams != (stream,):
            raise InvalidArgumentError(
                "the group must read this stream and no other; name a group that was created for the query",
                group=group,
                streams=found.config.streams,
                stream=stream,
            )
        self._client = client
        self._group = group
        self._synchronizer = found.synchronizer
        self._updater = GroupUpdater(found.synchronizer, client.streams)
        self._coordinator = ReaderCoordinator(self._updater)
        self._lease = Lease(client.store, found.synchronizer.segment, secrets.token_hex(8), client.clock)
        self._lock = threading.Lock()
        self._place: tuple[StreamState, StreamCut] | None = None
        self._published: StreamCut | None = None
        self._positions: Positions = {}
        self._complaint: str | None = None  # the failure that was logged last
        self._updater.add_reader(READER, self._lease, alone=True)
        self._termination = _Termination()
        self._coordinator.add(self)

    def publish(self, state: StreamState, cut: StreamCut) -> None:
        """Commit that all events before the cut are processed, and check that the reader is in the group."""
        self._place, self._published = (state, cut), None
        self.catch_up()

    def catch_up(self) -> None:
        """Publish the last cut if that failed before."""
        if self._place is not None and self._place[1] != self._published and not self._lease.lost:
            try:
                self._stand_at(moved_to_data(self._client, *self._place))
            except ReaderGroupError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    logger.warning("the positions of the query were not published: %s", error)
            else:
                self._published, self._complaint = self._place[1], None
        if self._lease.lost:
            raise ReaderNotInGroupError(
                "the query stops, because another query uses its readerGroup or its reader was removed from it; give "
                "each query a group of its own",
                group=self._group,
                reader=READER,
            )

    def close(self) -> None:
        """Leave the group. Can be called twice."""
        self._coordinator.remove(self)
        try:
            if not self._lease.lost:
                self._updater.remove_reader(
                    READER,
                    lease=self._lease.name,
                    reached=self._positions,
                    cause="closed",
                    timeout=_LEAVE_SECONDS,
                )
        except ReaderGroupError as error:
            logger.warning("the reader of the query could not leave its group: %s", error)
        finally:
            self._lease.lose()
            self._termination.goes_on()

    # ------------------------------------------------------------------ for the coordinator

    @property
    def renewed_at(self) -> float:
        return self._lease.renewed_at

    def renew_if_due(self) -> float:
        interval = self._synchronizer.state.config.reader_timeout_seconds / RENEWALS
        if self._client.clock.monotonic() >= self._lease.renewed_at + interval:
            self._renew()
        return float("inf") if self._lease.lost else self._lease.renewed_at + interval

    def on_new_state(self) -> None:
        """Pass all checkpoints at once, at the position of the last batch."""
        state = self._synchronizer.state
        for checkpoint in state.checkpoints_ahead_of(READER) if self._is_in(state) else ():
            self._updater.pass_checkpoint(READER, self._lease.name, checkpoint.token, self._positions)

    # ------------------------------------------------------------------ inside

    def _stand_at(self, cut: StreamCut) -> None:
        state = self._synchronizer.fetch_updates()
        if not self._is_in(state):
            return self._renew()  # this detects the loss
        if not self._is_behind(state, cut):
            reset(self._updater, {cut.stream: cut})
            state = self._synchronizer.state
        with self._lock:
            self._positions = {
                segment: SegmentPosition(found.token, cut.offsets[segment])
                for segment, found in state.segments_of(READER).items()
                if found.token is not None and segment in cut.offsets
            }
        self._renew()

    def _is_behind(self, state: ReaderGroupState, cut: StreamCut) -> bool:
        """Whether the reader reaches the cut by reading on in its segments, rather than in others or backwards."""
        owned = state.segments_of(READER)
        stands_at = {segment: found.offset for segment, found in owned.items()}
        for segment, reached in self._positions.items():
            if segment in owned and owned[segment].token == reached.token:
                stands_at[segment] = max(stands_at[segment], reached.offset)
        return stands_at.keys() == cut.offsets.keys() and all(
            offset <= cut.offsets[segment] for segment, offset in stands_at.items()
        )

    def _renew(self) -> None:
        with self._lock:
            timeout_seconds = self._synchronizer.state.config.reader_timeout_seconds
            self._lease.renew(self._positions, timeout_seconds)

    def _is_in(self, state: ReaderGroupState) -> bool:
        """Whether the group's reader is this one, not that of another query."""
        found = state.readers.get(READER)
        return found is not None and found.lease == self._lease.name


class _Termination:
    """Delays SIGTERM until the reader has left its group.

    Spark sends the signal at the moment when it closes the connection, on which the source ends by itself.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_held_back = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._is_held_back:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self._came = True

    def goes_on(self) -> None:
        if self._is_held_back:
            self._is_held_back = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._came:
                os.kill(os.getpid(), signal.SIGTERM)
