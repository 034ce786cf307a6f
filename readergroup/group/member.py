"""A reader as a member of its group: how it joins, renews its lease, learns that it is out, joins again, and leaves."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    NotFoundError,
    OutcomeUnknownError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
    TransitionFeed,
)
from synchronizer.backoff import Backoff
from synchronizer.clock import stopwatch
from synchronizer.liveness.keeper import is_store_unavailable
from synchronizer.liveness.lease import Lease
from synchronizer.liveness.leaving import leaving
from synchronizer.liveness.timing import RENEWALS
from synchronizer.loggers import get_logger

from ..errors import ReaderNotInGroupError
from ..streams.event import Position
from ..telemetry.logs import LogAbout
from .coordinator import ReaderCoordinator
from .model.config import ReaderGroupConfig
from .model.positions import Positions
from .model.state import ReaderGroupState
from .model.updates import RemoveReader
from .updater import GroupUpdater

_logger = get_logger(__name__)

#: How long a reader that leaves retries a store that does not answer.
LEAVE_SECONDS: Final = 5.0

#: Why a reader that is out of its group does not join again by itself.
_STAYS_OUT: Final[Mapping[str, str]] = {
    "replaced": "another process took over the reader's id; this reader stays out of the group",
    "removed": "the reader was removed from the group; open another reader to continue",
    "deleted": "the group was deleted and created again; open another reader",
}


class GroupMember:
    """The membership of one reader.

    The reading thread calls the methods, and the coordinator's thread those that `CoordinatedReader` names.

    Args:
        updater: Changes the group's state.
        coordinator: Renews the lease in the background. It holds the member weakly, so that a reader that is forgotten
            without being closed stops renewing its lease.
        reader_id: The reader's name in the group.
        positions: Returns the positions that a renewal commits. Called from several threads.
        keeps_checkpoints: Whether the application does something at checkpoints.
        busy_since: Returns when the event that runs for longest was started, None if none runs. Called from several
            threads. Default: the application has the reading thread while it handles an event.
        timeout: The longest wait, in seconds, for one answer of the store.
    """

    def __init__(
        self,
        updater: GroupUpdater,
        coordinator: ReaderCoordinator,
        reader_id: str,
        positions: Callable[[], Positions],
        *,
        keeps_checkpoints: bool,
        busy_since: Callable[[], float | None] | None = None,
        timeout: float,
    ) -> None:
        self.reader_id = reader_id
        self.keeps_checkpoints = keeps_checkpoints
        self._updater = updater
        self._coordinator = coordinator
        self._synchronizer = updater.synchronizer
        self._logger = LogAbout(_logger, group=updater.group, reader=reader_id)
        self._clock = updater.synchronizer.clock
        self._positions = positions
        self._busy_since = busy_since
        self._timeout = timeout
        self._counters = updater.counters
        self._feed: TransitionFeed[ReaderGroupState] = self._synchronizer.transitions()
        self.lease = self._new_lease()
        self._committed: Positions = {}
        self._commit_at = 0.0
        #: Whether the group's state, or the lease, may have changed since the reader looked.
        self.has_news = True
        #: When the last call returned or the last event was handed out. None: a call is running.
        self.left_at: float | None = None
        self._is_overdue = False  # and this was logged
        self._gone: ReaderNotInGroupError | None = None  # removed for good
        self.closed = False
        _members.add(self)

    # ------------------------------------------------------------------ joining and leaving

    def _new_lease(self) -> Lease:
        return Lease(self._synchronizer.store, self._synchronizer.segment, secrets.token_hex(8), self._clock)

    def join(self, timeout: float | None) -> None:
        """Join the group under a new lease."""
        self.lease = self._new_lease()
        with self._of_a_group_that_exists():
            self._updater.add_reader(self.reader_id, self.lease, keeps=self.keeps_checkpoints, timeout=timeout)
        self._commit_at = self._clock.monotonic() + self._config.position_interval_seconds
        self._coordinator.add(self)

    def join_again(self, state: ReaderGroupState, deadline: Deadline) -> None:
        """Join as a new incarnation, unless the reader was removed or replaced or its group was deleted."""
        self.lease.lose()
        why = _STAYS_OUT["replaced"] if self.reader_id in state.readers else self._why_it_stays_out()
        if why is None:
            extra = {"revision": str(self._synchronizer.revision)}
            self._logger.warning("reader %s was declared dead and rejoins", self.reader_id, extra=extra)
            self._counters.leases_lost += 1
            self.join(deadline.remaining(self._timeout))
            return
        self._coordinator.remove(self)
        self._gone = ReaderNotInGroupError(why, reader=self.reader_id, group=self._synchronizer.name)
        raise self._gone

    def _why_it_stays_out(self) -> str | None:
        """Return why the reader stays out; None if it was declared dead, or its end was in entries compacted unseen."""
        for transition in reversed(self._feed.drain()):
            if transition.after is None:
                return _STAYS_OUT["deleted"]
            if transition.before is None or not self.is_in(transition.before):
                continue
            for update in transition.updates:
                if isinstance(update, RemoveReader) and update.reader == self.reader_id:
                    return _STAYS_OUT.get(update.cause)
            if self.reader_id in transition.after.readers:  # a snapshot, with another reader of its id
                return _STAYS_OUT["replaced"]
        return None

    def leave(self, at: Position | None) -> None:
        """Leave the group, with the positions so far or ``at``.

        If the store is away, log a warning, or raise if ``at`` is given. The lease is given up in any case.
        """
        self._coordinator.remove(self)
        try:
            if self._gone is None:
                self._remove(at)
        except NotFoundError:
            self._logger.debug("reader %s: its group was deleted", self.reader_id)
        except (StoreUnavailableError, StoreFullError, DeadlineExceededError, OutcomeUnknownError) as error:
            if at is not None:
                raise
            self._logger.warning(
                "reader %s could not leave its group; its lease will expire, and others continue from its last "
                "commit: %s",
                self.reader_id,
                error,
            )
        finally:
            self.give_up()

    def _remove(self, at: Position | None) -> None:
        """Remove the reader from the group. Wait for a store that is away, and longer if other processes are faster."""
        deadline = Deadline(self._clock, self._timeout)
        while True:
            try:
                with leaving(self._synchronizer.store, self._clock, insists=at is not None):
                    self._updater.remove_reader(
                        self.reader_id,
                        lease=self.lease.name,
                        reached=self._positions(),
                        position=at,
                        cause="closed",
                        timeout=deadline.remaining(LEAVE_SECONDS),
                    )
                return
            except DeadlineExceededError as error:
                if is_store_unavailable(error) or deadline.passed:
                    raise

    def give_up(self) -> None:
        """Give up the lease, without a word to the group."""
        self.lease.lose()
        self._feed.close()

    # ------------------------------------------------------------------ the group's state

    @property
    def _config(self) -> ReaderGroupConfig:
        return self._synchronizer.state.config

    def check(self) -> None:
        """Raise if the reader was closed, or is out of its group for good."""
        if self.closed:
            raise ClosedError("the reader is closed; open another", reader=self.reader_id)
        if self._gone is not None:
            raise self._gone.with_traceback(None)  # else it grows with each call

    def is_in(self, state: ReaderGroupState) -> bool:
        """Return whether the group holds this reader, and not another one with its id."""
        found = state.readers.get(self.reader_id)
        return found is not None and found.lease == self.lease.name

    def fetch(self, deadline: Deadline) -> ReaderGroupState:
        """Bring the group's state up to date and return it."""
        with self._of_a_group_that_exists():
            return self._synchronizer.fetch_updates(timeout=deadline.remaining(self._timeout))

    def fetch_news(self, deadline: Deadline) -> None:
        """Bring the group's state up to date if there may be news."""
        if self.has_news:
            self.has_news = False  # before the fetch: a change that arrives during it needs another check
            try:
                self.fetch(deadline)
            except BaseException:
                self.has_news = True
                raise

    def has_read_news(self) -> None:
        """Note that the reader follows the state as it is: no transition before it matters any more."""
        self._feed.drain()

    @contextmanager
    def _of_a_group_that_exists(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise NotFoundError(
                "the group was deleted; create it with groups.create, then open another reader",
                group=self._synchronizer.name,
            ) from error

    # ------------------------------------------------------------------ the lease

    def is_alive(self) -> bool:
        """Return whether the lease is valid, so that the reader may hand out events."""
        return self._clock.monotonic() < self.lease.valid_until

    def renew(self) -> bool:
        """Renew the lease and commit the positions; False if the reader is no longer in the group."""
        positions, config = self._positions(), self._config
        begin = stopwatch()
        if not self.lease.renew(positions, config.reader_timeout_seconds):
            self.has_news = True
            return False
        self._counters.commits.add(stopwatch() - begin)
        self._committed = positions
        self._commit_at = self._clock.monotonic() + config.position_interval_seconds
        return True

    def renew_until(self, deadline: Deadline) -> None:
        """Renew the lease, and wait for a store that is away until the deadline."""
        try:
            is_in = Backoff(self._clock, deadline).retry(self.renew)
        except StorePermissionError:
            raise
        except (StoreUnavailableError, StoreFullError) as error:
            raise DeadlineExceededError("the positions were not committed in time; commit again") from error
        if not is_in:
            raise ReaderNotInGroupError(
                "the reader was declared dead or removed; others continue from its last commit", reader=self.reader_id
            )

    def ensure_lease(self, deadline: Deadline) -> bool:
        """Renew the lease if it has run out; False if the reader lost it and the group's state is to be followed."""
        if self.is_alive():
            return True
        if self.renew():
            self._coordinator.add(self)  # if the answer to the join was lost, the lease begins only now
            return True
        if self.is_in(self.fetch(deadline)):
            self._logger.warning("reader %s lost its lease and rejoins", self.reader_id)
            self._counters.leases_lost += 1
            self.join(deadline.remaining(self._timeout))
        return False

    # ------------------------------------------------------------------ for the coordinator

    @property
    def renewed_at(self) -> float:
        """When the last accepted renewal was sent."""
        return self.lease.renewed_at

    def renew_if_due(self) -> float:
        """Renew the lease if it is due, and return when it is due next. Runs in the coordinator's thread."""
        if self.lease.lost or not self.lease.begun:
            return float("inf")  # until the reader has joined, or joined again
        now, config = self._clock.monotonic(), self._config
        interval = config.reader_timeout_seconds / RENEWALS
        left_at = self.left_at if self._busy_since is None else self._busy_since()
        if left_at is not None and now - left_at > config.max_processing_seconds:
            self._note_overdue(now - left_at)
            return now + interval  # no renewal: liveness decides
        self._is_overdue = False
        if now >= self.lease.renewed_at + interval or (now >= self._commit_at and self._positions() != self._committed):
            if not self.renew():
                return float("inf")
        elif now >= self._commit_at:
            self._commit_at = now + config.position_interval_seconds
        return min(self.lease.renewed_at + interval, self._commit_at)

    def _note_overdue(self, seconds: float) -> None:
        if not self._is_overdue:
            self._is_overdue = True
            self._logger.warning(
                "reader %s of %s was not called for %.3g s and no longer renews its lease: others take over its "
                "segments, and it rejoins at its next call; if handlers may take that long, raise "
                "max_processing_seconds",
                *(self.reader_id, self._synchronizer.name, seconds),
            )

    def on_new_state(self) -> None:
        """Make the reader check the group's state before the next event. May be called from any thread."""
        self.has_news = True

    # ------------------------------------------------------------------ whose time it is

    def hand_back(self) -> None:
        """The application has the thread: ``max_processing_seconds`` begins to run."""
        self.left_at = self._clock.monotonic()

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """The reader has the thread, for as long as it takes."""
        self.left_at = None
        try:
            yield
        finally:
            self.hand_back()

    @contextmanager
    def in_callback(self) -> Iterator[None]:
        """Within a call, the application has the thread."""
        self.hand_back()
        try:
            yield
        finally:
            self.left_at = None


#: The members of this process.
_members: Final[weakref.WeakSet[GroupMember]] = weakref.WeakSet()


def _end_leases_in_child() -> None:
    """Make readers check their leases, which are over in a forked child, before their next event."""
    for member in _members:
        member.has_news = True


os.register_at_fork(after_in_child=_end_leases_in_child)
