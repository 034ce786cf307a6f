"""The local replica of a state: follows the log in the store, and raises when it cannot continue."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar
from weakref import ref

from ..backoff import Backoff
from ..call_limits import call_limit
from ..clock import Clock, Deadline
from ..errors import (
    ClosedError,
    CorruptStateError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    StoreUnavailableError,
    TruncatedError,
    UnknownUpdateError,
)
from ..state import S, StateCodec
from ..threads.flag import Bell, Flag
from .entries import Entry, EntryLog, Mark, Revision
from .replica import Replica, Transition, TransitionFeed

R = TypeVar("R")

#: How often to try a reload while newer snapshots keep replacing the one that is being read.
_MAX_RELOADS: Final = 20
#: How many reads of one fetch must find the log damaged, lost or unreadable before the replica stops for good.
LOOKS: Final = 3


class Measured(NamedTuple):
    """The encoded size of a state in bytes, and the length of the log when it was measured."""

    size: int
    length: int


class LogFollower(Generic[S]):
    """The replica of one process, as far as it has applied the log. Threads share it.

    Read ``replica`` without the lock; replace it with the lock held. Entries that cannot be applied, even after they
    are read again, stop the follower for good: every later call raises the error.
    """

    def __init__(self, log: EntryLog, codec: StateCodec[S], clock: Clock) -> None:
        self.log = log
        self.codec = codec
        self.clock = clock
        self.closing = Flag()
        self.barred_thread: int | None = None  # runs a generator, which must not call the synchronizer
        self.lock = threading.RLock()  # guards what follows
        self.changed = Bell()
        self.replica: Replica[S] = Replica()
        self.mark: Mark | None = None  # as last seen
        self.begins_at = 0  # the offset of the first entry, if there is no mark
        self.reloads = 0  # from a snapshot ahead of the replica
        self.measured = Measured(0, 0)
        #: Called, with the lock held, for every entry that is applied from the log.
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self._broken: ReaderGroupError | None = None
        self._untold: Sequence[Transition[S]] = ()  # led to `replica`; the feeds do not have them yet
        self._feeds: tuple[ref[TransitionFeed[S]], ...] = ()  # weak: a dropped feed is filled no more
        self._pid = os.getpid()

    def transitions(self) -> TransitionFeed[S]:
        with self.lock:
            feed = TransitionFeed(self.replica, self._forget)
            self._feeds = (*self._held_feeds(), ref(feed))
            return feed

    def _forget(self, feed: TransitionFeed[S]) -> None:
        with self.lock:
            self._feeds = tuple(each for each in self._held_feeds() if each() is not feed)

    def _held_feeds(self) -> list[ref[TransitionFeed[S]]]:
        return [each for each in self._feeds if each() is not None]

    def begin(self, deadline: Deadline) -> None:
        """Load the newest snapshot, if there is one, and apply the log after it."""
        if self._reload(deadline) or not self._read_beginning(deadline):
            self.fetch(deadline)

    @property
    def compacted_upto(self) -> int:
        """The offset from which on a process that joins now applies the log, as far as this process knows."""
        return self.mark.next_offset if self.mark else self.begins_at

    def begin_at(self, offset: int) -> None:
        """Follow the log from its first entry on, which is at this offset, or will be."""
        with self.lock:
            self.begins_at = offset
            if self.replica.next_offset >= offset:
                return
            self.mark, self.measured = None, Measured(0, offset)
            # What was followed until now was deleted long ago, and the entry that tells of it is gone.
            nothing = Replica[S](None, Revision(offset - 1, 0), offset)
            before = self.replica.state
            ends = [] if before is None else [Transition(before, None, nothing.revision, gap=True)]
            self._go_on_from(nothing, ends)

    def _read_beginning(self, deadline: Deadline) -> bool:
        """Apply the first entries of the log; return whether these were all."""
        try:
            beginning = self.retry(deadline, self.log.read_beginning)
        except (CorruptStateError, UnknownUpdateError):
            return False  # reading it again tells whether that is so
        if beginning is None:
            return False
        offset, entries, at_end = beginning
        self.begin_at(offset)
        self.apply(entries)
        return at_end

    def fetch(self, deadline: Deadline) -> Replica[S]:
        """Apply the log at least up to its end when the call began, and return the replica."""
        reloads = looks = 0
        doubts = self.backoff(deadline)
        while True:
            self.check_usable()
            try:
                at_end = self._read_on(self.replica, deadline)
            except TruncatedError:
                reloads += 1
                if reloads > _MAX_RELOADS:
                    raise DeadlineExceededError(
                        "the log was truncated again after every reload; try again",
                        segment=self.log.segment,
                        tries=_MAX_RELOADS,
                    ) from None
                continue
            except (CorruptStateError, UnknownUpdateError) as error:
                looks += 1
                if looks == LOOKS:
                    self._stop(error)
                    raise
                doubts.wait()  # one answer may be wrong, such as that of a server that is being replaced
                continue
            if at_end:
                return self.replica
            if deadline.passed:
                raise DeadlineExceededError(
                    "the log was not read to its end in time; try again, or use a longer timeout",
                    segment=self.log.segment,
                )

    def _read_on(self, replica: Replica[S], deadline: Deadline) -> bool:
        """Apply entries after ``replica``; return whether these were all."""
        try:
            entries, at_end = self.retry(deadline, lambda: self.log.read(replica.next_offset, replica.checksum))
        except TruncatedError:
            if not self._reload(deadline, past=replica.next_offset) and not self._begin_again(replica, deadline):
                raise CorruptStateError(
                    "the log was truncated and has no snapshot to continue from; restore the store from a backup",
                    segment=self.log.segment,
                    offset=replica.next_offset,
                ) from None
            raise
        if entries:
            self.apply(entries)
        return at_end

    def _begin_again(self, replica: Replica[S], deadline: Deadline) -> bool:
        """Follow the log that has taken the place of a forgotten one since ``replica``; return False if none has."""
        self._read_beginning(deadline)
        return self.replica.next_offset > replica.next_offset

    def history(self, after: Revision, deadline: Deadline) -> Sequence[Transition[S]]:
        """Return the transitions after a revision, read again from the store. The replica does not change."""
        for _ in range(_MAX_RELOADS):
            self.check_usable()
            try:
                return self._history(after, deadline)
            except (NotFoundError, TruncatedError):
                continue  # a compaction has replaced that snapshot, or truncated the log
        raise DeadlineExceededError(
            "every snapshot was replaced while it was read; try again", segment=self.log.segment, tries=_MAX_RELOADS
        )

    def _history(self, after: Revision, deadline: Deadline) -> Sequence[Transition[S]]:
        replica: Replica[S] = Replica()
        transitions: list[Transition[S]] = []
        mark = self.retry(deadline, self.log.mark)
        if mark is not None:
            body = self.retry(deadline, lambda: self.log.read_snapshot(mark))
            replica = Replica.from_snapshot(mark, body, self.codec)
            if replica.revision > after:
                transitions.append(Transition(None, replica.state, replica.revision, gap=True))
        elif (beginning := self.retry(deadline, self.log.read_beginning)) is not None:
            replica = Replica(next_offset=beginning[0])
        at_end = False
        while not at_end:
            entries, at_end = self.retry(deadline, partial(self.log.read, replica.next_offset, replica.checksum))
            for entry in entries:
                replica, transition = replica.follow(entry, self.codec, self.log.segment)
                if transition.revision > after:
                    transitions.append(transition)
        return transitions

    def apply(self, entries: Sequence[Entry]) -> None:
        """Apply those of ``entries`` that follow the replica."""
        with self.lock:
            for entry in entries:
                if entry.offset != self.replica.next_offset:
                    continue  # another thread has applied it, or loaded a newer snapshot
                replica, transition = self.replica.follow(entry, self.codec, self.log.segment)
                if transition.before is None:
                    self.measured = Measured(len(entry.body), entry.end)
                self.on_entry(entry)
                self._go_on_from(replica, [transition])

    def take_over(self, tail: Replica[S], transitions: Sequence[Transition[S]]) -> None:
        """Move the replica forward to ``tail``, and tell the feeds those of ``transitions`` that are new to them."""
        with self.lock:
            if self.replica.next_offset < tail.next_offset:
                here = self.replica.next_offset
                self._go_on_from(tail, [each for each in transitions if each.revision.offset >= here])

    @property
    def is_stopped(self) -> bool:
        """Whether an error stopped it for good. Every later call raises that error."""
        return self._broken is not None

    def _stop(self, error: ReaderGroupError) -> None:
        """Make every later call raise ``error``."""
        self._broken = error

    def _go_on_from(self, replica: Replica[S], transitions: Sequence[Transition[S]]) -> None:
        """Replace the replica by the one that ``transitions`` lead to, and tell the feeds. Hold the lock."""
        if self._untold:  # by an interrupted call
            self._tell()
        self.replica, self._untold = replica, transitions
        try:
            self._tell()
        except BaseException:  # interrupted: a feed ignores a transition that it already has
            self._tell()
            raise

    def _tell(self) -> None:
        for transition in self._untold:
            for each in self._feeds:
                feed = each()
                if feed is not None:
                    feed.put(transition)
        self._untold = ()

    def _reload(self, deadline: Deadline, *, past: int = 0) -> bool:
        """Load the newest snapshot; return False if there is none past the offset ``past``."""
        for _ in range(_MAX_RELOADS):
            mark = self.retry(deadline, self.log.mark)
            if mark is None or mark.next_offset <= past:
                return False
            try:
                body = self.retry(deadline, partial(self.log.read_snapshot, mark))
            except NotFoundError:
                continue  # a newer mark has replaced it
            replica = Replica.from_snapshot(mark, body, self.codec)
            with self.lock:
                self.mark, self.measured = mark, Measured(len(body), mark.next_offset)
                if replica.next_offset > self.replica.next_offset:
                    transition = Transition(self.replica.state, replica.state, replica.revision, gap=True)
                    self.reloads += 1
                    self._go_on_from(replica, [transition])
            return True
        raise DeadlineExceededError(
            "every snapshot was replaced while it was read; try again", segment=self.log.segment, tries=_MAX_RELOADS
        )

    def retry(self, deadline: Deadline, call: Callable[[], R]) -> R:
        """Return the result of ``call``, repeated while the store is unavailable. Raise at the deadline.

        Raise `StorePermissionError` at once.
        """
        backoff, before = self.backoff(deadline), call_limit.deadline
        try:
            call_limit.deadline = deadline
            while True:
                try:
                    return call()
                except StoreUnavailableError as error:
                    self.wait(backoff, error, "the store did not answer in time")
        finally:
            call_limit.deadline = before

    def backoff(self, deadline: Deadline) -> Backoff:
        return Backoff(self.clock, deadline, self.closing)

    def wait(self, backoff: Backoff, problem: BaseException, at_deadline: str) -> None:
        """Pause before another attempt. Raise after `close`, or ``at_deadline`` when the deadline has passed.

        A missing right is raised at once.
        """
        if backoff.wait(problem):
            return
        if self.closing.is_set():
            raise ClosedError("the object, or its client, was closed", segment=self.log.segment)
        raise DeadlineExceededError(at_deadline, segment=self.log.segment, cause=str(problem)) from problem

    def check_usable(self, *, deciding: bool = False) -> None:
        if self.closing.is_set():
            raise ClosedError("the object, or its client, is closed; open another", segment=self.log.segment)
        if os.getpid() != self._pid:
            raise ClosedError(
                "the object belongs to the parent process; connect after the fork, and open another",
                segment=self.log.segment,
            )
        if self.barred_thread == threading.get_ident() and not deciding:
            raise InvalidArgumentError(
                "a generator must not call the synchronizer; use the state that it gets as its argument"
            )
        if self._broken is not None:
            raise self._broken.with_traceback(None)
