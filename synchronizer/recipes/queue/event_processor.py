"""`EventProcessor`: the one consumer of a durable queue."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Final, TypedDict

from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.callables import check_callable
from synchronizer.clock import Clock, growing_pause
from synchronizer.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, ReaderGroupError
from synchronizer.liveness.timing import observe_interval
from synchronizer.patience import Patience
from synchronizer.retries import Retries
from synchronizer.store import SegmentStore
from synchronizer.threads.background import BackgroundThread, survive
from synchronizer.threads.flag import Flag

from .consumer import BatchHandler, Consumer, Handler, HandlingLatency, QueuedEvent
from .event_queue import MAX_OUTSTANDING_BYTES, EventQueue

#: How long one wait for growth lasts: closing is noticed after it.
_WAIT_SECONDS: Final = 0.25
_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 2.0

_logger = logging.getLogger(__name__)


class EventProcessorOptions(TypedDict, total=False):
    """Arguments of `EventProcessor` that a client passes on."""

    batch_handler: BatchHandler
    max_batch: int
    retries: Retries
    set_aside: bool
    consumer_timeout_seconds: float
    max_outstanding_bytes: int


class EventProcessor(EventQueue):
    """The queue ``name`` on ``store``, and its consumer: ``handler`` is called with each event, in order.

    Or ``batch_handler`` with several at a time, up to ``max_batch``. An event is handled when the call returns; if it
    raises, it is called again, as ``retries`` say, and later events wait. After the last attempt the processor stops
    with `HandlerError`, or with ``set_aside`` the event goes to the dead letters. A batch that fails comes again event
    by event, so that only what fails alone is set aside.

    Of all processors of a name one at a time handles events; the others wait, and one of them takes over when it is
    closed, or has been silent for ``consumer_timeout_seconds``. Events since the last stored position come again then:
    up to ``max_batch`` and those of a second. Two threads are its own, or none with ``threads=False``, for tests, which
    call `step`.
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
        for what, given in (("a handler", handler), ("a batch_handler", batch_handler)):
            if given is not None:
                check_callable(given, what, queue=name)
        if handler is not None and batch_handler is None:
            batch_handler, together = _one_by_one(handler), 1
        elif handler is not None or batch_handler is None:
            raise InvalidArgumentError("give either a handler or a batch_handler", queue=name)
        check_count(max_batch, "max_batch")
        check_type(retries, Retries, "retries", or_none=True)
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
        if threads:
            self._thread = BackgroundThread(self._run, name=f"events of {name}", clock=self.clock)
            keeping = BackgroundThread(
                self._keep_role, name=f"role of event processor {name}", clock=self.clock, stopping=self._stopped
            )
            try:
                self._thread.start()
                keeping.start()
            except BaseException:
                self._consumer.stopping.set()  # of the one that has started
                super().close()
                raise

    @property
    def active(self) -> bool:
        """Whether it is this one that handles the events, as far as it knows."""
        return self._consumer.active

    @property
    def error(self) -> BaseException | None:
        """What it stopped with; None while it works, and if it was closed."""
        return self._error

    @property
    def latency(self) -> HandlingLatency:
        """How long the last thousand calls of the handler took."""
        return self._consumer.latency

    @property
    def processed_events(self) -> int:
        """How many events were handled here, or set aside."""
        return self._consumer.processed_events

    @property
    def processed_bytes(self) -> int:
        """The bytes of the segment that these events took."""
        return self._consumer.processed_bytes

    def drain(self, *, timeout: float | None = None) -> None:
        """Return when all that was added before is handled, here or elsewhere; raise what this one stopped with."""
        deadline = self._deadline(timeout)
        patience = Patience(self.clock, deadline)
        _, target = patience.call(self._look)
        attempts = 0
        while patience.call(self._look).handled < target:
            self._check_error()
            if deadline.passed:
                raise DeadlineExceededError("events were not handled in time", queue=self.name)
            attempts += 1
            pause = growing_pause(attempts, first=0.005, most=_WAIT_SECONDS)
            self.clock.wait(self._stopped, deadline.remaining(pause))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the processor has stopped, and raise what it stopped with; False if it goes on."""
        check_duration(timeout, "timeout", or_none=True)
        stopped = self._stopped.wait(timeout)
        self._check_error()
        return stopped

    def close(self, *, timeout: float | None = None) -> None:
        """Stop after the event, or batch, in hand, which is waited for; the next consumer goes on behind it.

        If that takes longer than ``timeout``, the processor's by default, this returns, and nobody else gets the event
        while this process and the store live. To handle first what is there, call `drain`.
        """
        check_duration(timeout, "timeout", or_none=True)
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        self._consumer.stopping.set()
        if self._thread is None:
            self._leave()
        elif self._thread is not threading.current_thread():
            self._thread.join(self.timeout if timeout is None else timeout)
            if self._thread.is_alive():
                _logger.warning("%s was closed, and its handler still runs", self.name)
        super().close()

    def step(self) -> int:
        """One round, without threads: handle the next events, if this process holds the role; how many there were."""
        before = self.processed_events
        self._consumer.step()
        return self.processed_events - before

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
                        _logger.warning("%s: the store does not answer, and is asked again: %s", self.name, error)
                    self.clock.wait(
                        stopping, growing_pause(failures, first=_FIRST_PAUSE_SECONDS, most=_MAX_PAUSE_SECONDS)
                    )
        except ClosedError as error:
            if not stopping.is_set():
                self._error = error
        except BaseException as error:  # also what ends a process: here it ends this thread alone
            self._error = error
            _logger.error("%s: no more events are handled here: %s", self.name, error)
        finally:
            if failures:  # the store does not answer: what was handled since the position was stored last comes again
                _logger.warning("%s: the role could not be released and expires", self.name)
            else:
                self._leave()
            self._stopped.set()

    def _wait(self, due: float) -> None:
        """Until something is due, or the queue has grown, if that is what it waits for."""
        timeout = due - self.clock.monotonic()
        if timeout <= 0:
            return
        if self._consumer.active and not self._consumer.has_events:
            self.store.wait({self.segment: self._consumer.handled}, min(timeout, _WAIT_SECONDS))
        else:
            self.clock.wait(self._consumer.stopping, timeout)

    def _keep_role(self) -> None:
        while not self.clock.wait(self._stopped, self._renewal_seconds):
            try:
                self._consumer.renew()
            except ClosedError:
                return
            except ReaderGroupError as error:
                _logger.debug("%s: the role was not renewed: %s", self.name, error)
            except Exception as error:
                survive(error, f"role of event processor {self.name}")

    def _leave(self) -> None:
        try:
            self._consumer.leave()
        except ClosedError:
            return  # it runs out
        except ReaderGroupError as error:
            _logger.warning("%s: the role could not be released and expires: %s", self.name, error)

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)


def _one_by_one(handler: Handler) -> BatchHandler:
    def handle(events: Sequence[QueuedEvent]) -> object:
        (event,) = events
        return handler(event)

    return handle
