"""`EventProcessor`: the one consumer of a durable queue."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Final, TypedDict

from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.backoff import Backoff
from synchronizer.callables import check_callable
from synchronizer.clock import Clock, growing_pause
from synchronizer.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, ReaderGroupError
from synchronizer.liveness.keeper import Keeper
from synchronizer.liveness.timing import observe_interval
from synchronizer.loggers import get_logger
from synchronizer.store import SegmentStore
from synchronizer.threads.background import BackgroundThread, survive, waits_for_caller
from synchronizer.threads.flag import Flag

from .consumer import BatchHandler, Consumer, Handler, HandlingLatency, QueuedEvent
from .event_queue import EventQueue
from .limits import MAX_OUTSTANDING_BYTES
from .retries import Retries

#: The longest single wait for growth; a processor notices `close` after it.
_WAIT_SECONDS: Final = 0.25
_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 2.0

_logger = get_logger(__name__)


class EventProcessorOptions(TypedDict, total=False):
    """Keyword arguments of `EventProcessor` that a client passes on."""

    batch_handler: BatchHandler
    max_batch: int
    retries: Retries
    set_aside: bool
    consumer_timeout_seconds: float
    max_outstanding_bytes: int


class EventProcessor(EventQueue):
    """A queue and its consumer: calls a handler with each event, in order, at least once.

    An event is handled when the call returns. If the handler raises, it is called again after a backoff, and later
    events wait. A batch that fails is delivered again event by event.

    One processor of a queue at a time handles events. Another one takes over when it closes or dies, and repeats the
    events since the last stored position: at most ``max_batch``. The position is stored after each batch, and every
    second within one. Two background threads do the work.

    Args:
        store: Holds the queue. It is borrowed and never closed.
        name: The name of the queue.
        handler: Called with one `QueuedEvent` at a time. Give either this or ``batch_handler``.
        batch_handler: Called with a list of up to ``max_batch`` events.
        max_batch: The number of events in a batch, at most.
        retries: Attempts per event, and the delays between them; by default 5 attempts.
        set_aside: Move an event to the dead letters when its last attempt fails. By default the processor stops with
            `HandlerError` and the event stays in the queue.
        consumer_timeout_seconds: Another processor takes over when this one has been silent for this long.
        max_outstanding_bytes: Adding waits while more bytes than this are not handled.
        clock: The system's clock by default.
        timeout: The default of all calls, in seconds.
        threads: False in tests, which call `step`.

    Raises:
        InvalidArgumentError: Neither or both of ``handler`` and ``batch_handler`` are given.
    """

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        handler: Handler | None = None,
        *,
        batch_handler: BatchHandler | None = None,
        max_batch: int = 100,
        retries: Retries | None = None,
        set_aside: bool = False,
        consumer_timeout_seconds: float = 10.0,
        max_outstanding_bytes: int = MAX_OUTSTANDING_BYTES,
        clock: Clock | None = None,
        timeout: float = 30.0,
        threads: bool = True,
    ) -> None:
        together = max_batch
        if handler is not None:
            check_callable(handler, "a handler", takes="event", queue=name)
        if batch_handler is not None:
            check_callable(batch_handler, "a batch_handler", takes="events", queue=name)
        if handler is not None and batch_handler is None:
            batch_handler, together = _one_by_one(handler), 1
        elif handler is not None or batch_handler is None:
            raise InvalidArgumentError("pass either handler or batch_handler", queue=name)
        check_count(max_batch, "max_batch")
        check_type(retries, Retries, "retries", or_none=True)
        if retries is not None and (unknown := retries.model_fields_set - Retries.model_fields.keys()):
            raise InvalidArgumentError(
                "a queue has its own dead letters and no delayed retries; pass Retries(...), and set_aside=True to "
                "move events that fail to the dead letters of the queue",
                queue=name,
                unknown=sorted(unknown),
            )
        check_duration(consumer_timeout_seconds, "consumer_timeout_seconds", above_zero=True, finite=True)
        super().__init__(store, name, max_outstanding_bytes=max_outstanding_bytes, clock=clock, timeout=timeout)
        self._consumer = Consumer(
            store,
            self.segment,
            name,
            batch_handler,
            max_batch=max_batch,
            together=together,
            retries=retries or Retries(),
            dead_letters=self._dead_letters if set_aside else None,
            timeout_seconds=consumer_timeout_seconds,
            clock=self.clock,
            on_handled=lambda offset: self._backpressure.learn(handled=offset),
        )
        self._process_id = os.getpid()
        self._renewal_seconds = observe_interval(consumer_timeout_seconds)
        self._error: BaseException | None = None
        self._stopped = Flag()
        self._thread: threading.Thread | None = None
        self._keeper = Keeper(
            self._keep_role,
            name=f"role of event processor {name}",
            clock=self.clock,
            logger=_logger,
            max_pause_seconds=self._renewal_seconds,
        )
        if threads:
            self._thread = BackgroundThread(self._run, name=f"events of {name}", clock=self.clock)
            try:
                self._thread.start()
                self._keeper.start()
            except BaseException:
                self.close()  # the thread that has started may hold the role
                raise

    @property
    def active(self) -> bool:
        """Whether this processor handles the events, as far as it knows."""
        return self._consumer.active

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the processor; None while it works, and after `close`."""
        return self._error

    @property
    def latency(self) -> HandlingLatency:
        """The duration of the last 1000 calls of the handler."""
        return self._consumer.latency

    @property
    def processed_events(self) -> int:
        """The number of events that this processor handled or set aside."""
        return self._consumer.processed_events

    @property
    def processed_bytes(self) -> int:
        """The size of these events in the segment, in bytes."""
        return self._consumer.processed_bytes

    def drain(self, *, timeout: float | None = None) -> None:
        """Wait until all events added before the call are handled, by this or another processor.

        Args:
            timeout: Seconds to wait; by default the processor's ``timeout``.

        Raises:
            DeadlineExceededError: Some events were not handled in time.
            HandlerError: This processor has stopped; likewise any other `error` that stopped it.
        """
        deadline = self._deadline(timeout)
        backoff = Backoff(self.clock, deadline)
        _, target = backoff.retry(self._look)
        attempts = 0
        while backoff.retry(self._look).handled < target:
            self._check_error()
            if deadline.passed:
                raise DeadlineExceededError(
                    "the events were not handled in time; wait again, or use a longer timeout", queue=self.name
                )
            attempts += 1
            pause = growing_pause(attempts, first=0.005, most=_WAIT_SECONDS)
            self.clock.wait(self._stopped, deadline.remaining(pause))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the processor stops and raise its `error`, if there is one; return False if it still works.

        Args:
            timeout: Seconds to wait; None waits until it stops.
        """
        check_duration(timeout, "timeout", or_none=True)
        stopped = self._stopped.wait(timeout)
        self._check_error()
        return stopped

    def stop(self) -> None:
        """Stop after the current event or batch, without waiting for it. `close` waits."""
        if os.getpid() == self._process_id:  # a forked child: the role belongs to the parent
            self._consumer.stopping.set()

    def close(self, *, timeout: float | None = None) -> None:
        """Stop after the current event or batch; the next consumer continues after it.

        To handle all queued events first, call `drain`.

        Args:
            timeout: Seconds to wait for the running handler; by default the processor's ``timeout``. If the handler
                still runs then, return; this process keeps the role until the handler returns.
        """
        check_duration(timeout, "timeout", or_none=True)
        if os.getpid() != self._process_id:
            return  # a forked child: the role belongs to the parent
        self.stop()
        if self._thread is None:
            self._leave()
        elif self._thread.is_alive() and not waits_for_caller(self._thread):
            self._thread.join(self.timeout if timeout is None else timeout)
            if self._thread.is_alive():
                _logger.warning("%s was closed while its handler was running", self.name)
        super().close()

    def step(self) -> int:
        """Without threads: handle the next events if this process holds the role; return how many there were."""
        before = self.processed_events
        self._consumer.step()
        return self.processed_events - before

    def handle_queued(self) -> float:
        """Without threads: handle all queued events; return when, on the clock, the role is to be renewed."""
        while self.step():
            pass
        return self.clock.monotonic() + self._renewal_seconds

    # ------------------------------------------------------------------ the threads

    def _run(self) -> None:
        stopping, failures = self._consumer.stopping, 0
        try:
            while not stopping.is_set():
                try:
                    self._wait(self._consumer.step())
                    failures = 0
                except Exception as error:
                    if isinstance(error, ReaderGroupError) and not error.retryable:
                        raise
                    failures += 1
                    if not isinstance(error, ReaderGroupError):
                        survive(error, f"events of {self.name}")
                    elif failures == 1:
                        _logger.warning("%s: the store does not answer and is retried: %s", self.name, error)
                    self.clock.wait(
                        stopping, growing_pause(failures, first=_FIRST_PAUSE_SECONDS, most=_MAX_PAUSE_SECONDS)
                    )
        except ClosedError as error:
            if not stopping.is_set():
                self._error = error
        except BaseException as error:  # also SystemExit: it ends this thread, not the process
            self._error = error
            _logger.error("%s: this process handles no more events: %s", self.name, error)
        finally:
            if failures > 1:  # the store does not answer: events since the last stored position come again
                _logger.warning("%s: the role could not be released and will expire", self.name)
            else:
                self._leave()
            self._stopped.set()
            self._keeper.wake()

    def _wait(self, due: float) -> None:
        """Wait until the next round is due or, if all events are handled, until the queue has grown."""
        timeout = due - self.clock.monotonic()
        if timeout <= 0:
            return
        if self._consumer.active and not self._consumer.has_events:
            self.store.wait({self.segment: self._consumer.handled}, min(timeout, _WAIT_SECONDS))
        else:
            self.clock.wait(self._consumer.stopping, timeout)

    def _keep_role(self) -> float | None:
        if self._stopped.is_set():
            return None
        self._consumer.renew()
        return self.clock.monotonic() + self._renewal_seconds

    def _leave(self) -> None:
        try:
            self._consumer.leave()
        except ClosedError:
            return  # the role expires
        except ReaderGroupError as error:
            _logger.warning("%s: the role could not be released and will expire: %s", self.name, error)

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)


def _one_by_one(handler: Handler) -> BatchHandler:
    def handle(events: Sequence[QueuedEvent]) -> object:
        (event,) = events
        return handler(event)

    return handle
