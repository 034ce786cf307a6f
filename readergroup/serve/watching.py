"""The live view of one group: a thread that follows it while someone watches, for all who do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, NamedTuple

from notifications import PRESENT_VALUE, SEVERAL_CHANGES, Change, Notification
from synchronizer import ClosedError, NotFoundError, ReaderGroupError, Transition
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.liveness.keeper import Keeper
from synchronizer.loggers import get_logger
from synchronizer.threads.flag import Flag

from ..aio.calls import News
from ..group.model.state import ReaderGroupState
from ..group.updater import is_of_another_stream
from ..group.words import words
from ..scaling.autoscale import ROLE
from .audience import Audience
from .documents import Document, changes, encode, group_document
from .measuring import GroupMeter, RenewedAt, expired, silent_seconds
from .sample import GroupSample
from .sampler import BUSY, Sampler

#: How often the lag is read. Changes of the group show at once.
LOOK_SECONDS: Final = 1.0
#: The least time between two looks, so that a group that changes all the time does not keep the thread busy.
PAUSE_SECONDS: Final = 0.1
#: How long a group is followed after the last viewer has left.
LINGER_SECONDS: Final = 10.0
#: How many groups are followed at once, and by how many viewers in all.
MAX_WATCHED: Final = 16
MAX_VIEWERS: Final = 64
#: How many notices a viewer that falls behind can catch up with.
KEPT_NOTICES: Final = 200

_logger = get_logger(__name__)


class TooManyError(Exception):
    """There are too many viewers, or too many watched groups."""


class Notice(NamedTuple):
    """A notification or a decision, in words."""

    number: int
    at: float
    text: str


class Published:
    """A document that viewers get: whole, or as what has changed since the one before it."""

    def __init__(self, version: int, document: Document, before: Document | None) -> None:
        self.version = version
        self.document = document
        #: None: there is no document before it.
        self.changes = None if before is None else encode(changes(before, document))

    @cached_property
    def whole(self) -> bytes:
        return encode(self.document)


class GroupWatch:
    """Follows one group. Threads may share it."""

    def __init__(self, sampler: Sampler, name: str) -> None:
        self.name = name
        self.newest: Published | None = None
        #: Whether the thread has ended: a viewer needs another watch.
        self.ended = False
        self.deleted = False
        self.viewers = 0
        self._sampler = sampler
        self._client = sampler.client
        self._clock = sampler.client.clock
        self._group = self._client.groups.get(name)
        self._meter = GroupMeter(self._client, self._group)
        self._feed = self._group.synchronizer.transitions()
        self._renewed_at: RenewedAt = {}
        self._sample: GroupSample | None = None
        self._wanted_readers: int | None = None
        self._lag_at = self._left_at = self._clock.monotonic()
        self._lock = threading.Lock()
        self._number = 0
        self._notices: deque[Notice] = deque(maxlen=KEPT_NOTICES)
        self._audience = Audience()
        self._pause = Flag()  # never set
        self._keeper = Keeper(
            self._step,
            name=f"web view of {name}",
            clock=self._clock,
            logger=_logger,
            wait=self._wait,
            on_end=self._end,
            max_pause_seconds=LOOK_SECONDS,
        )

    @contextmanager
    def viewed(self, news: News) -> Iterator[None]:
        """Follow the group during the block, and ring the news when there is something new."""
        with self._lock:
            self.viewers += 1
        try:
            self._audience.add(news)
            self._keeper.start()
            yield
        finally:
            self._audience.discard(news)
            with self._lock:
                self.viewers -= 1
                self._left_at = self._clock.monotonic()

    def follow(self) -> None:
        """Follow the group for a while. Without a viewer by then, the watch ends."""
        self._left_at = self._clock.monotonic()
        self._keeper.start()

    def notices(self, after: int) -> list[Notice]:
        """Return the notices after this number."""
        with self._lock:
            return [each for each in self._notices if each.number > after]

    def note(self, text: str) -> None:
        """Show a notice to all viewers."""
        with self._lock:
            self._number += 1
            self._notices.append(Notice(self._number, self._clock.time(), text))
        self._audience.ring()

    # ------------------------------------------------------------------ the thread

    def _step(self) -> float | None:
        now = self._clock.monotonic()
        if self.ended or (not self.viewers and now - self._left_at > LINGER_SECONDS):
            return None
        try:
            self._look(now)
        except ClosedError:
            raise
        except ReaderGroupError as error:
            if isinstance(error, NotFoundError) and not is_of_another_stream(error):
                self.deleted = True
                return None
            text = self._sampler.count(error)
            if self._sample is not None:
                self._publish(self._sample, error=text)
            self._lag_at = self._clock.monotonic() + LOOK_SECONDS
        return self._lag_at

    def _look(self, now: float) -> None:
        is_due = now >= self._lag_at
        if is_due:
            state, revision, lag, self._renewed_at, *_ = self._meter.measure()
            self._look_at_role()
        else:
            self._meter.follow()
            if self._sample is None:
                return
            lag = self._sample.lag
            state, revision = self._group.synchronizer.snapshot_of_state
        if not is_due and self._sample is not None and self._sample.revision == revision:
            return
        at = self._clock.time()
        history = self._sampler.history(self.name)
        history.see(state, revision, at)
        if is_due:
            history.see_lag(lag)
            done = self._clock.monotonic()
            self._lag_at = done + max(LOOK_SECONDS, (done - now) * (1 / BUSY - 1))
        for transition in self._feed.drain():
            for notification in self._notifications(transition):
                self.note(words(notification))
        self._sample = GroupSample(self.name, state, revision, lag, at, self._sampler.retries.of(self.name))
        self._publish(self._sample)

    def _publish(self, sample: GroupSample, *, error: str | None = None) -> None:
        silent = silent_seconds(sample.state, self._renewed_at, self._clock.monotonic())
        dead = expired(sample.state, silent)
        readers = {
            reader: {
                "lease_seconds": round(silent[reader], 1) if reader in silent else None,
                "expired": reader in dead,
            }
            for reader in sample.state.readers
        }
        before = None if self.newest is None else self.newest.document
        document = group_document(sample, self._sampler.history(self.name), readers, before)
        document["error"] = error
        document["wanted_readers"] = self._wanted_readers
        self.newest = Published(1 if self.newest is None else self.newest.version + 1, document, before)
        self._audience.ring()

    def _look_at_role(self) -> None:
        """Find what `ReaderGroup.autoscale`, in any process, called for last."""
        synchronizer = self._group.synchronizer
        stored = synchronizer.store.attributes(synchronizer.segment, names=[ROLE]).get(ROLE)
        payload = RoleValue.decode(stored).payload
        wanted = payload[0] if payload else None
        if wanted is not None and wanted != self._wanted_readers:
            self.note(f"autoscaling: {wanted:,} readers are wanted")
        self._wanted_readers = wanted

    def _notifications(self, transition: Transition[ReaderGroupState]) -> Iterator[Notification]:
        if transition.after is None:
            return
        cause = ", ".join(update.tag for update in transition.updates)
        if transition.gap:
            cause = SEVERAL_CHANGES
        elif transition.before is None:
            cause = PRESENT_VALUE
        change = Change(
            source=self.name,
            revision=transition.revision,
            cause=cause,
            seen_at=datetime.fromtimestamp(self._clock.time(), UTC),
            gap=transition.gap,
            updates=transition.updates,
        )
        group = self._group
        for notifier in (
            group.segment_notifier,
            group.reader_notifier,
            group.checkpoint_notifier,
            group.end_of_data_notifier,
            group.retention_notifier,
        ):
            yield from notifier.detect(transition.before, transition.after, change)

    def _wait(self, timeout: float) -> None:
        """Wait until the group or one of its streams changes."""
        pause = min(PAUSE_SECONDS, timeout)
        self._clock.wait(self._pause, pause)
        synchronizer = self._group.synchronizer
        known = {synchronizer.segment: synchronizer.applied_length, **self._meter.followed}
        synchronizer.store.wait(known, min(timeout - pause, LOOK_SECONDS))

    def _end(self, closed: ClosedError | None) -> None:
        self.discard()
        self._audience.ring()

    def discard(self) -> None:
        """End the watch, which no one views."""
        self.ended = True
        self._feed.close()


class Watches:
    """The groups that are watched, and their viewers."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._watches: dict[str, GroupWatch] = {}
        self._viewers = 0
        self._lock = threading.Lock()

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Count a viewer during the block. Raise `TooManyError` if there are too many."""
        with self._lock:
            if self._viewers >= MAX_VIEWERS:
                raise TooManyError(f"there are {MAX_VIEWERS} viewers already; close one of their pages")
            self._viewers += 1
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1

    @property
    def viewers(self) -> int:
        return self._viewers

    def open(self, name: str) -> GroupWatch:
        """Return the watch of this group. It calls the store. Raise `NotFoundError` if there is no such group."""
        with self._lock:
            self._watches = {each: watch for each, watch in self._watches.items() if not watch.ended}
            if (found := self._watches.get(name)) is not None:
                return found
            if len(self._watches) >= MAX_WATCHED:
                raise TooManyError(f"{MAX_WATCHED} groups are watched already; close one of their pages")
        made = GroupWatch(self._sampler, name)
        with self._lock:
            kept = self._watches.setdefault(name, made)
        if kept is not made:  # another viewer was faster
            made.discard()
        kept.follow()
        return kept

    def note(self, name: str, text: str) -> None:
        """Show a notice to all viewers of the group."""
        if (watch := self._watches.get(name)) is not None:
            watch.note(text)
