"""Returns waiting events to the group when their next attempt is due, by way of its stream of retries.

Every pool with a `DelayedRetry` has a thread that does it. It sleeps until an event may be due, so it writes nothing
and reads little while nothing is. Then one of the threads takes a lock and writes the events to the stream of retries
as an outbox writes its rows, each once. After that they are truncated where they waited.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Final

from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    HeldLock,  # here, not for type checkers only: the thread must not load it
    LeaseLostError,
    NotFoundError,
    ReaderGroupError,
)
from synchronizer.clock import growing_pause
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, survive
from synchronizer.threads.flag import Flag

from ..outbox.publishing import Publisher
from ..outbox.table import Row
from ..scaling.retry import DelayedRetry
from ..scaling.scaled_group import PoolClient, ScaledGroup
from ..telemetry.logs import LogAbout
from .waiting import DelayLog, WaitingFrame, clear_waiting

#: The longest time until the next look, as the clock may be set.
MAX_SLEEP_SECONDS: Final = 60.0
_MIN_SLEEP_SECONDS: Final = 0.01
_LOCK_SECONDS: Final = 1.0
_FIRST_PAUSE_SECONDS: Final = 0.2
_MAX_PAUSE_SECONDS: Final = 30.0

_logger = get_logger(__name__)


class Returning:
    """Returns the waiting events of one group. For one thread."""

    def __init__(self, client: PoolClient, group: ScaledGroup, retry: DelayedRetry) -> None:
        self._client = client
        self._group = group
        self._retry = retry
        self._clock = client.clock
        self._store = client.streams.store
        self._logger = LogAbout(_logger, group=group.name)
        self._stopping = Flag()
        self._thread = BackgroundThread(self._run, name=f"retries of {group.name}", clock=self._clock)
        self._heads: dict[str, WaitingFrame] = {}
        #: By segment: what waited there at an earlier look, and when that was.
        self._seen: dict[str, tuple[int, float]] = {}

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop, and wait up to ``timeout`` seconds for the thread, but no longer than 2 s."""
        self._stopping.set()
        if self._thread.is_alive():  # an interrupt may have come before it was
            self._thread.join(min(timeout, 2 * _LOCK_SECONDS))

    def clear(self) -> None:
        """Drop what handlers have left since the group was deleted."""
        with suppress(ReaderGroupError):
            clear_waiting(self._store, self._group.name, self._group.synchronizer.fetch_updates)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                pause = self.step()
                failures = 0
            except ClosedError:
                return
            except Exception as error:
                failures += 1
                pause = growing_pause(failures, first=_FIRST_PAUSE_SECONDS, most=_MAX_PAUSE_SECONDS)
                if not isinstance(error, ReaderGroupError):
                    survive(error, f"retries of {self._group.name}")
                elif failures.bit_count() == 1:
                    self._logger.warning(
                        "%s: events wait longer for their retry, and the next try is in %.3g s: %s",
                        *(self._group.name, pause, error),
                    )
            self._clock.wait(self._stopping, pause)

    def step(self) -> float:
        """Return what is due to the group. Return the seconds until the next look."""
        # A new event waits for at least the shortest delay, so a look as often as that finds it in time.
        sleep = min(self._retry.delays)
        due = []
        for log in DelayLog.all_of(self._store, self._group.name):
            head = self._head(log)
            if head is None:
                continue
            if self._is_due(log, head):
                due.append(log)
            else:
                sleep = min(sleep, max(0.0, head.event.due - self._clock.time()))
        if due:
            try:
                with self._client.lock(f"retries/{self._group.name}", timeout=_LOCK_SECONDS) as held:
                    self._check_stream()
                    for log in due:
                        self._return(log, held)
            except (DeadlineExceededError, LeaseLostError):
                return _LOCK_SECONDS  # another process returns them
            return _MIN_SLEEP_SECONDS
        return min(MAX_SLEEP_SECONDS, max(_MIN_SLEEP_SECONDS, sleep))

    def _head(self, log: DelayLog) -> WaitingFrame | None:
        """Return the first event of the log; read it only once."""
        info = self._store.info(log.segment)
        head = self._heads.get(log.segment)
        if info.start_offset == info.length:
            self._heads.pop(log.segment, None)
            self._seen.pop(log.segment, None)
            return None
        if head is None or head.offset != info.start_offset:
            head = next(iter(log.read(info.start_offset)), None)
            if head is not None:
                self._heads[log.segment] = head
        return head

    def _is_due(self, log: DelayLog, frame: WaitingFrame) -> bool:
        if log.segment not in self._seen:
            length = self._store.info(log.segment).length
            self._seen[log.segment] = length, self._clock.monotonic()  # after the call, which may take long
        if self._clock.time() >= frame.event.due:
            return True
        # If the clock was set back, events wait for their delay once more, and no longer.
        length, since = self._seen[log.segment]
        if self._clock.monotonic() - since < log.delay:
            return False
        if frame.offset < length:
            return True
        del self._seen[log.segment]
        return False

    def _check_stream(self) -> None:
        stream = self._retry.retry_stream
        self._group.synchronizer.fetch_updates()
        if stream not in self._group.config.streams:
            raise NotFoundError("the group does not read the stream of retries; add it to its streams", stream=stream)

    def _return(self, log: DelayLog, held: HeldLock) -> None:
        outbox_id = hashlib.sha256(f"retries\n{log.segment}".encode()).digest()[:16]
        publisher = Publisher(self._client.streams, self._retry.retry_stream, outbox_id, held.fencing_token)
        while not self._stopping.is_set():
            frames = [*takewhile(partial(self._is_due, log), log.read())]
            if not frames:
                break
            left = {each.offset: _row(each) for each in frames}
            while left:
                if not publisher.has_begun:
                    for row in publisher.begin():
                        left.pop(row, None)
                for row in publisher.publish(left.values()) if left else ():
                    del left[row]
            self._store.truncate(log.segment, frames[-1].end)
            # Only now: a later process that finds the events here must find them there.
            publisher.deleted()
        log.forget_sources(frozenset(self._group.synchronizer.state.segments))


def _row(frame: WaitingFrame) -> Row:
    event = frame.event
    return Row(frame.offset, event.routing_key, event.data, event.headers, event_time=event.event_time)
