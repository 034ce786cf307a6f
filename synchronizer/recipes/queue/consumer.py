"""The consumer of a queue, a round at a time: take the role, handle the next events, store the position.

The position is the offset up to which events are handled. It is part of the role's payload, with the holder's timeout.
So a consumer that has lost the role changes nothing, and the next consumer continues there. The position is stored
before the handled events are truncated.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from synchronizer.callables import NotHandledError, check_returned
from synchronizer.clock import Clock
from synchronizer.errors import HandlerError, TruncatedError
from synchronizer.liveness.exclusive_role import ExclusiveRole
from synchronizer.liveness.timing import STOP_AFTER, observe_interval
from synchronizer.loggers import get_logger
from synchronizer.store import MAX_ATTRIBUTE_CHANGES, SegmentStore
from synchronizer.threads.flag import Flag

from ...compare_and_set import remove_attributes
from .dead_letters import MAX_ERROR_LENGTH, DeadLetters, encode_dead_event
from .event_queue import CONSUMER, handled_upto
from .frames import Frame, read_frames
from .producer import ADDERS
from .retries import Retries, text_of

#: The position is stored after each batch, and this often within one.
POSITION_SECONDS: Final = 1.0
#: Handled events are truncated when they take this many bytes.
TRUNCATE_BYTES: Final = 256 * 1024
#: The number of a process that has added nothing for this long is removed. It is far longer than a call takes. If the
#: process adds again, it starts with a new number.
FORGET_ADDERS_SECONDS: Final = 600.0
#: The latency is that of the last N calls of the handler.
_CALLS_MEASURED: Final = 1000

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """An event as its handler gets it. ``offset`` grows from event to event and is the same at every delivery."""

    data: bytes
    queue: str
    offset: int

    @property
    def key(self) -> str:
        """A unique key, the same at every delivery: use it in an idempotent sink."""
        return f"{self.queue}@{self.offset}"


@dataclass(frozen=True, slots=True)
class HandlingLatency:
    """The duration of the last 1000 calls of the handler, in seconds."""

    mean_seconds: float = 0.0
    p99_seconds: float = 0.0


Handler = Callable[[QueuedEvent], object]
BatchHandler = Callable[[Sequence[QueuedEvent]], object]


class Consumer:
    """The consumer of one process. One thread calls `step`, another one `renew`; any thread may call the rest."""

    def __init__(
        self,
        store: SegmentStore,
        segment: str,
        queue: str,
        handler: BatchHandler,
        *,
        max_batch: int,
        together: int,
        retries: Retries,
        dead_letters: DeadLetters | None,
        timeout_seconds: float,
        clock: Clock,
        on_handled: Callable[[int], None],
    ) -> None:
        self.active = False
        #: Events before ``handled`` are handled. ``committed`` is the stored position.
        self.handled = self.committed = 0
        self.processed_events = 0
        self.processed_bytes = 0
        self.stopping = Flag()
        self._store = store
        self._segment = segment
        self._queue = queue
        self._handler = handler
        self._max_batch = max_batch
        self._together = together
        self._retries = retries
        self._dead_letters = dead_letters
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._on_handled = on_handled
        self._role = ExclusiveRole(store, segment, CONSUMER, clock)
        self._recording = threading.Lock()  # held while the position or the role changes
        self._times_taken = 0
        self._recorded_at = float("-inf")
        self._truncated = 0
        self._frames: deque[Frame] = deque()  # read and not handled
        self._failures = 0  # of the first frame, in a row
        self._alone_until = 0  # events before this offset were in a batch that failed
        self._retry_at = float("-inf")
        self._durations: deque[float] = deque(maxlen=_CALLS_MEASURED)
        self._adders: dict[str, bytes] = {}  # as last read
        self._forget_at = clock.monotonic() + FORGET_ADDERS_SECONDS

    @property
    def has_events(self) -> bool:
        """Whether there are events that were read and not handled."""
        return bool(self._frames)

    @property
    def latency(self) -> HandlingLatency:
        durations = sorted(self._durations.copy())
        if not durations:
            return HandlingLatency()
        return HandlingLatency(sum(durations) / len(durations), durations[len(durations) * 99 // 100])

    def step(self) -> float:
        """Handle the next events if this consumer holds the role; return when the next round is due.

        Raise `HandlerError` if the last attempt of an event failed and events are not set aside,
        `InvalidArgumentError` if the handler returned an awaitable or a generator, and the errors of the store.
        """
        now = self._clock.monotonic()
        if not self._take_role():
            return now + observe_interval(self._agreed_timeout())
        if self.handled > self.committed:  # the last commit failed
            self._commit()
        if now < self._retry_at:
            return min(self._retry_at, now + observe_interval(self._timeout_seconds))
        if not self._frames:
            self._frames.extend(self._read())
        if not self._frames:
            self._forget_adders(now)
            return now + observe_interval(self._timeout_seconds)
        failed = self._handle_batch()
        self._commit()
        if failed is not None:
            raise failed from failed.__cause__
        return max(now, self._retry_at)

    def renew(self) -> None:
        """Renew the role while a handler runs for long."""
        with self._recording:
            left = self._role.valid_until - self._clock.monotonic()
            if self.active and left < STOP_AFTER * self._timeout_seconds / 2:
                self._record()

    def leave(self) -> None:
        """Store the position and release the role, so that the next consumer continues there at once."""
        with self._recording:
            if self.active:
                self._record()
                self.active = False
            self._role.give_up()  # also if the answer to taking it was lost

    # ------------------------------------------------------------------ the role

    def _take_role(self) -> bool:
        with self._recording:
            if not self._role.take(self._agreed_timeout()):
                if self.active:
                    _logger.warning("%s: another consumer took over", self._queue)
                self.active = False
                return False
            if self.active and self._times_taken == self._role.times_taken:
                return True
            self.active = False
            if self._dead_letters is not None:
                self._dead_letters.take_over(self._role.own_id)
            self._times_taken = self._role.times_taken
            self.committed = self.handled = handled_upto(self._role.value)
            self._frames.clear()
            self._failures = self._alone_until = 0
            self._retry_at = float("-inf")
            self._role.take(self._timeout_seconds)  # from here on with this consumer's timeout
            self._record()
            if not self.active:
                return False
            _logger.info("%s: this process handles events from offset %d on", self._queue, self.handled)
            return True

    def _agreed_timeout(self) -> float:
        """Return the holder's timeout. The holder renews by it, so other consumers must judge it by the same."""
        value = self._role.value
        is_known = value.holder_id and len(value.payload) > 1  # `clear` may leave a position alone
        return value.payload[1] if is_known else self._timeout_seconds

    def _record(self) -> None:
        """Store the position, which renews the role. The caller holds the lock."""
        position = self.handled
        self.active = self._role.record(position, self._timeout_seconds)
        if self.active:
            self.committed = position
            self._recorded_at = self._clock.monotonic()

    def _commit(self) -> None:
        with self._recording:
            if self.active:
                self._record()
        if not self.active:
            return
        self._on_handled(self.committed)
        if self.committed - self._truncated >= TRUNCATE_BYTES:
            self._store.truncate(self._segment, self.committed)
            self._truncated = self.committed

    # ------------------------------------------------------------------ the events

    def _read(self) -> Sequence[Frame]:
        try:
            return read_frames(self._store, self._segment, self.handled)
        except TruncatedError:
            with self._recording:
                self._record()
            if self.active:
                raise
            return ()  # truncated by the consumer that took over during a pause of this one

    def _handle_batch(self) -> HandlerError | None:
        """Handle up to ``max_batch`` events; return the error to stop with, if there is one."""
        end = self.processed_events + self._max_batch
        while self._frames and self.processed_events < end and self._may_handle():
            frames = self._next_frames(end - self.processed_events)
            error = self._call(frames)
            if error is None:
                self._done(frames)
            elif len(frames) > 1:
                self._part(frames, error)
                break
            elif (stop_with := self._failed(frames[0], error)) is not None:
                return stop_with
            elif self._failures:
                break
            if self._clock.monotonic() - self._recorded_at >= POSITION_SECONDS:
                self._commit()
        return None

    def _may_handle(self) -> bool:
        return self.active and not self.stopping.is_set() and self._clock.monotonic() < self._role.valid_until

    def _next_frames(self, at_most: int) -> Sequence[Frame]:
        alone = self._together == 1 or self._frames[0].offset < self._alone_until
        return [self._frames[index] for index in range(1 if alone else min(at_most, self._together, len(self._frames)))]

    def _call(self, frames: Sequence[Frame]) -> Exception | None:
        began = self._clock.monotonic()
        try:
            returned = self._handler([QueuedEvent(frame.data, self._queue, frame.offset) for frame in frames])
        except Exception as error:
            return error
        except NotHandledError as ended:
            raise ended.error from None
        finally:
            self._durations.append(self._clock.monotonic() - began)
        if returned is not None:  # not a failure of this event: all others would fail the same way
            check_returned(returned, "a handler", queue=self._queue, offset=frames[0].offset)
        return None

    def _done(self, frames: Sequence[Frame]) -> None:
        self.processed_events += len(frames)
        self.processed_bytes += frames[-1].end - frames[0].offset
        self.handled = frames[-1].end
        self._failures = 0
        for _ in frames:
            self._frames.popleft()

    # ------------------------------------------------------------------ when the handler fails

    def _part(self, frames: Sequence[Frame], error: Exception) -> None:
        """Deliver the events of a failed batch one by one, so that only events that fail alone are retried."""
        self._alone_until = frames[-1].end
        delay = self._pause(1)
        _logger.warning(
            "%s: a batch of %d events failed; they are retried one by one in %.3g s: %r",
            self._queue,
            len(frames),
            delay,
            error,
        )

    def _failed(self, frame: Frame, error: Exception) -> HandlerError | None:
        self._failures += 1
        attempts = self._retries.attempts
        if self._failures < attempts:
            delay = self._pause(self._failures)
            _logger.warning(
                "%s: attempt %d of %d at offset %d failed; the next is in %.3g s: %r",
                *(self._queue, self._failures, attempts, frame.offset, delay, error),
            )
        elif self._dead_letters is not None:
            self._set_aside(self._dead_letters, frame, error)
        else:
            failed = HandlerError(
                "the handler failed on its last attempt and the event stays in the queue; fix the handler, or "
                "move such events to the dead letters with set_aside=True",
                segment=self._segment,
                offset=frame.offset,
                attempts=self._failures,
                error=text_of(error),
            )
            failed.__cause__ = error
            return failed
        return None

    def _pause(self, attempt: int) -> float:
        delay = self._retries.delay_after(attempt)
        self._retry_at = self._clock.monotonic() + delay
        return delay

    def _set_aside(self, dead_letters: DeadLetters, frame: Frame, error: Exception) -> None:
        text = text_of(error, MAX_ERROR_LENGTH)
        letter = encode_dead_event(
            data=frame.data,
            offset=frame.offset,
            error=text,
            attempts=self._failures,
            written_at=self._clock.time(),
        )
        if not dead_letters.put(self._role.own_id, letter, frame.offset):
            self.active = False
            return
        _logger.error(
            "%s: the event at offset %d was moved to the dead letters", self._queue, frame.offset, exc_info=error
        )
        self._done([frame])

    # ------------------------------------------------------------------ the processes that add

    def _forget_adders(self, now: float) -> None:
        """Remove the numbers of the processes that have added nothing since the last check."""
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_ADDERS_SECONDS
        before, self._adders = self._adders, dict(self._store.attributes(self._segment, ADDERS))
        silent = [name for name, number in self._adders.items() if before.get(name) == number]
        if silent:
            known = {name: self._adders[name] for name in silent[:MAX_ATTRIBUTE_CHANGES]}
            remove_attributes(self._store, self._segment, known)  # if one has changed, nothing is removed: next time
