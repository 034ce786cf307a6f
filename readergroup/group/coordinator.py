"""The background work of one process for its group: two threads for all its readers.

The first thread renews their leases, which commits their positions, and does nothing else, so that nothing delays it.
The second follows the group's log and the metadata of its streams, declares readers dead whose leases ran out, and
proposes the planner's moves and automatic checkpoints. `ReaderCoordinator.step` is one round of both and returns when
the next is due; tests and simulations call it instead of starting the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final, Protocol
from weakref import WeakValueDictionary

from synchronizer import (
    ClosedError,
    NotFoundError,
    ReaderGroupError,
    Revision,
    StateTooLargeError,
)
from synchronizer.liveness.keeper import RETRY_SECONDS, Keeper
from synchronizer.liveness.lease import DeathWatch
from synchronizer.loggers import get_logger
from synchronizer.threads.background import survive
from synchronizer.threads.flag import Flag

from ..telemetry.logs import LogAbout
from .load import LoadMeter
from .model import balance
from .model.state import ReaderState
from .pace import Pace
from .updater import GroupUpdater, newest_checkpoint

_logger = get_logger(__name__)

#: How long the coordinator waits for hand-overs before it balances the group during them.
HAND_OVER_SECONDS: Final = 0.5
#: How long an automatic checkpoint waits for readers to pass it; ``max_processing_seconds`` if that is longer.
CHECKPOINT_SECONDS: Final = 600.0


class CoordinatedReader(Protocol):
    """The methods of a reader that its coordinator calls."""

    reader_id: str

    @property
    def renewed_at(self) -> float: ...
    @property
    def keeps_checkpoints(self) -> bool: ...
    def renew_if_due(self) -> float: ...
    def on_new_state(self) -> None: ...


class ReaderCoordinator:
    """Coordinates the readers that joined it, which it holds weakly: a reader forgotten without being closed is let go,
    and its lease runs out. The threads start with the first reader and end with the last one, or the client.
    """

    def __init__(self, updater: GroupUpdater, *, threads: bool = True) -> None:
        self._updater = updater
        self._synchronizer = updater.synchronizer
        self._clock = updater.synchronizer.clock
        self._threaded = threads
        self._lock = threading.Lock()
        self._readers: WeakValueDictionary[str, CoordinatedReader] = WeakValueDictionary()
        self._logger = LogAbout(_logger, group=updater.group)
        name, keeper = self._synchronizer.name, partial(Keeper, clock=self._clock, logger=self._logger)
        self._leases = keeper(lambda: self.renew() if self._readers else None, name=f"{name}-leases")
        self._group = keeper(
            lambda: self.work() if self._readers else None, name=f"{name}-group", wait=self._wait_for_work
        )
        parts = (
            self._observe,
            self._follow,
            self._balance,
            self._weigh,
            self._give_up_checkpoint,
            self._begin_checkpoint,
            self._tell,
            self._maintain,
        )
        self._rest = [partial(self._unless_deleted, part) for part in parts]  # after each fetch
        self._pause = Flag()  # never set
        self._pace = Pace(self._clock)
        self._deaths = DeathWatch(self._clock)
        self._load: LoadMeter | None = None  # while this process measures
        self._follow_at = float("-inf")
        self._followed: Mapping[str, int] = {}  # lengths of the streams' metadata logs, as far as they were followed
        self._told: Revision | None = None  # the last one that the readers were told of
        self._balanced_at: Revision | None = None  # the one that needs no moves
        self._propose_at: float | None = None
        self._newest_checkpoint: tuple[int, float] | None = None  # the newest, and when it was first seen
        self._under_way: tuple[int, float] | None = None  # the automatic checkpoint, and when it was first seen
        self._is_deleted = False  # the group, when it was last fetched
        self._proposes_for: Revision | None = None  # the newest when `_propose_at` was set

    def add(self, reader: CoordinatedReader) -> None:
        """Coordinate the reader from now on."""
        with self._lock:
            self._readers[reader.reader_id] = reader
        try:
            if self._threaded:
                self._leases.start()
                self._group.start()
        except BaseException:
            self.remove(reader)
            raise
        self._leases.wake()

    def remove(self, reader: CoordinatedReader) -> None:
        """Stop coordinating the reader. The reader itself removes its lease."""
        with self._lock:
            if self._readers.get(reader.reader_id) is reader:
                del self._readers[reader.reader_id]
        self._leases.wake()

    def _present_readers(self) -> list[CoordinatedReader]:
        with self._lock:  # else the iteration fails when another thread adds or removes a reader
            return list(self._readers.values())

    def step(self) -> float:
        """Do all due work, and return when, on the clock, more is due. Raises nothing but `ClosedError`."""
        return min(self.renew(), self.work())

    def _wait_for_work(self, timeout: float) -> None:
        """Wait until the group's log or a stream's metadata grew, or until something is due."""
        if timeout > 0 and (pause := self._pace.pause):
            self._clock.wait(self._pause, min(pause, timeout))
            timeout -= pause
        # First, so that every update applied by another thread from now on wakes the coordinator.
        known = {**self._followed, self._synchronizer.segment: self._synchronizer.applied_length}
        if timeout <= 0 or self._synchronizer.revision != self._told:
            return
        if grown := self._synchronizer.store.wait(known, timeout) - {self._synchronizer.segment}:
            self._follow_by_rank(grown)

    def _follow_by_rank(self, grown: Collection[str]) -> None:
        """Follow the streams soon, by rank. The first process updates the group's state and spares the others."""
        self._followed = {name: length for name, length in self._followed.items() if name not in grown}
        self._follow_at = min(self._follow_at, self._clock.monotonic() + self._stagger(self._updater.state.readers))

    # ------------------------------------------------------------------ leases

    def renew(self) -> float:
        """Renew the leases that are due, and return when the next is due. Raises nothing but `ClosedError`."""
        due = float("inf")
        for reader in self._present_readers():
            try:
                due = min(due, reader.renew_if_due())
            except ClosedError:
                raise
            except NotFoundError:  # the group was deleted, as the other thread says: there is nothing to renew
                continue
            except Exception as error:
                if not isinstance(error, ReaderGroupError):
                    survive(error, f"{self._synchronizer.name}-leases")
                extra = {"reader": reader.reader_id}
                self._logger.info("reader %s of %s: %s", reader.reader_id, self._synchronizer.name, error, extra=extra)
                due = min(due, self._clock.monotonic() + RETRY_SECONDS)  # the renewal stays due
        return due

    # ------------------------------------------------------------------ the group

    def work(self) -> float:
        """Follow, observe and balance, and return when this is due again. Raises nothing but `ClosedError`."""
        due = self._group.attempt(self._fetch)
        return due if self._is_deleted else min(due, *map(self._group.attempt, self._rest))

    def _unless_deleted(self, part: Callable[[], float]) -> float:
        if self._is_deleted:
            return float("inf")
        try:
            return part()
        except NotFoundError:
            self._fetch()  # raises its own error if the group was deleted since the last fetch
            raise

    def _fetch(self) -> float:
        was_deleted, self._is_deleted = self._is_deleted, False
        try:
            config = self._synchronizer.fetch_updates().config
        except NotFoundError as error:
            self._is_deleted = True
            if not was_deleted:
                self._notify_readers()
            raise NotFoundError("the group was deleted; its readers raise NotFoundError at their next call") from error
        except ReaderGroupError as error:
            if not error.retryable:
                self._notify_readers()  # tells the readers that the group's log cannot be applied
            raise
        self._tell()
        return self._clock.monotonic() + config.refresh_interval_seconds

    def _tell(self) -> float:
        """Make the readers check a revision that is new to them, whichever thread applied it."""
        revision = self._synchronizer.revision
        if revision != self._told:
            self._told = revision
            self._pace.looked()
            self._notify_readers()
        return float("inf")

    def _notify_readers(self) -> None:
        for reader in self._present_readers():
            reader.on_new_state()
        self._leases.wake()

    def _observe(self) -> float:
        """Check the leases, and remove dead readers, with the moves that follow."""
        state = self._updater.state
        timeout_seconds = state.config.reader_timeout_seconds
        dead = self._deaths.look(
            state.readers, self._readers, self._updater.leases, timeout_seconds, lambda: self._renewed_at
        )
        for reader in self._updater.remove_dead(dead) if dead else ():
            self._updater.counters.readers_declared_dead += 1
            extra = {"reader": reader, "revision": str(self._synchronizer.revision)}
            self._logger.warning(
                "reader %s of %s is dead: its lease expired", reader, self._synchronizer.name, extra=extra
            )
        return self._deaths.due

    def _follow(self) -> float:
        """Bring the group up to the metadata of its streams."""
        now = self._clock.monotonic()
        if now < self._follow_at:
            return self._follow_at
        self._followed = self._updater.follow_streams()
        self._follow_at = now + self._updater.state.config.refresh_interval_seconds
        return self._follow_at

    def _balance(self) -> float:
        """Propose the planner's moves, staggered by rank, so that mostly one process does.

        Hand-overs come first if they are quick: the entry that ends the last one brings the moves.
        """
        state, revision = self._synchronizer.snapshot_of_state
        if revision == self._balanced_at:
            return float("inf")
        if not balance.plan(state):
            self._balanced_at, self._propose_at = revision, None
            return float("inf")
        now = self._clock.monotonic()
        stagger = self._stagger(state.readers)
        # For all but the first by rank, any change may mean that another process acts.
        if self._propose_at is None or (stagger and revision != self._proposes_for):
            is_handing_over = state.handing_over and not state.unassigned
            self._propose_at = now + stagger + (HAND_OVER_SECONDS if is_handing_over else 0.0)
            self._proposes_for = revision
        if now < self._propose_at:
            return self._propose_at
        self._propose_at = None
        try:
            self._updater.rebalance()
        except StateTooLargeError:
            self._balanced_at = revision  # there is no room for the moves until the state changes
            raise
        return now

    def _weigh(self) -> float:
        """Record the weights of the segments, if this process is the first by rank."""
        state = self._updater.state
        if state.config.balance != "load" or not state.readers or self._stagger(state.readers):
            self._load = None
            return float("inf")
        if self._load is None:
            self._load = LoadMeter(self._updater)
        return self._load.step()

    def _maintain(self) -> float:
        """Apply the policies that are due, of all streams of the store."""
        return self._updater.streams.maintenance.step()

    def _begin_checkpoint(self) -> float:
        """Begin an automatic checkpoint by rank when it is due, if a reader here saves something at it, or if retention
        goes by the last checkpoint.
        """
        state, now = self._updater.state, self._clock.monotonic()
        is_wanted = state.config.retention == "AT_LAST_CHECKPOINT"
        if not is_wanted and not any(reader.keeps_checkpoints for reader in self._present_readers()):
            self._newest_checkpoint = None
            return float("inf")
        newest = newest_checkpoint(state)
        if self._newest_checkpoint is None or self._newest_checkpoint[0] != newest:
            self._newest_checkpoint = newest, now
        due = (
            self._newest_checkpoint[1]
            + state.config.automatic_checkpoint_interval_seconds
            + self._stagger(state.readers)
        )
        if now < due:
            return due
        self._newest_checkpoint = newest, now
        self._updater.begin_automatic_checkpoint(after=newest)
        return now

    def _give_up_checkpoint(self) -> float:
        """Give up an automatic checkpoint that readers do not pass, so that the next one can begin."""
        state, now = self._updater.state, self._clock.monotonic()
        found = next((each for each in state.outstanding_checkpoints if each.automatic), None)
        if found is None:
            self._under_way = None
            return float("inf")
        if self._under_way is None or self._under_way[0] != found.token:
            self._under_way = found.token, now
        limit = state.config.max_processing_seconds
        seconds = CHECKPOINT_SECONDS if limit == float("inf") else max(CHECKPOINT_SECONDS, limit)
        due = self._under_way[1] + seconds + self._stagger(state.readers)
        if now < due:
            return due
        self._under_way = None
        waiting = self._updater.fail_checkpoint(found.token)
        if waiting is not None:
            self._logger.warning(
                "%s: checkpoint %s was cancelled after %.3g s, because these readers did not pass it: %s",
                *(self._synchronizer.name, found.name, seconds, ", ".join(sorted(waiting))),
                extra={"revision": str(self._synchronizer.revision)},
            )
        return now

    def _stagger(self, readers: Mapping[str, ReaderState]) -> float:
        """Return how long this process leaves shared work to the processes before it by rank."""
        return self._deaths.stagger(readers, self._readers)

    @property
    def _renewed_at(self) -> float:
        """When the last renewal of this process was sent."""
        return max((reader.renewed_at for reader in self._present_readers()), default=float("-inf"))
