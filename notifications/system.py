"""Delivers notifications to listeners: one blinker signal for each notification class and source."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Final, Generic, overload

from blinker import Signal

from synchronizer import ClosedError, Deadline, InvalidArgumentError, SystemClock
from synchronizer.arguments import check_class, check_count, check_duration, check_type
from synchronizer.callables import check_callable, check_returned, check_takes, is_async
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, raise_interrupt, waits_for_caller
from synchronizer.threads.loading import loading

from .mailbox import Mailbox, N
from .notification import Notification

if TYPE_CHECKING:
    from .event_loop import EventLoop

#: A function that receives notifications. Its result is ignored, except that a coroutine is awaited on its loop.
Listener = Callable[[N], object]

DEFAULT_QUEUE_SIZE: Final = 1000
#: How long `close` waits for running polls and calls of listeners.
CLOSE_TIMEOUT_SECONDS: Final = 5.0

_logger = get_logger(__name__)


class Subscription(Generic[N]):
    """One listener with a queue and a thread of its own: one call at a time, in the order of publication.

    If the listener raises, the error is logged, ``on_failure`` is called, and the next notification follows. A
    coroutine runs on the event loop that was running at the registration. Without ``thread``, `deliver` makes the
    calls; with it, `start` begins. `NotificationSystem.register_listener` creates it.
    """

    def __init__(
        self, listener: Listener[N], *, name: str, queue_size: int, thread: bool, on_failure: Callable[[], None]
    ) -> None:
        check_count(queue_size, "queue_size")
        self.listener = listener
        self._on_failure = on_failure
        self._mailbox: Mailbox[N] = Mailbox(queue_size)
        self._loop = _running_loop()
        check_listener(listener, name)
        if self._loop is None and is_async(listener):
            raise InvalidArgumentError(
                "an async listener runs on the event loop of its registration; register it in a coroutine", name=name
            )
        self._abandoned: Future[None] = Future()
        self._calling = threading.Lock()
        self._thread = BackgroundThread(self._run, name=f"listener of {name}") if thread else None

    def start(self) -> None:
        """Start the thread, if it has one of its own. After an error or an interrupt, close the subscription."""
        if self._thread is not None:
            self._thread.start()

    @property
    def coalesced(self) -> int:
        """The number of notifications that newer ones replaced because the listener was too slow."""
        return self._mailbox.coalesced

    @property
    def ended(self) -> bool:
        """Whether it is closed, and its listener is in no call and will not be called again."""
        return self._mailbox.closed and (self._thread is None or not self._thread.is_alive())

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs in this subscription's thread, that is, inside a call of the listener."""
        return self._thread is not None and waits_for_caller(self._thread)

    @property
    def is_this_loop(self) -> bool:
        """Whether the caller runs on the loop of the listener's coroutines. A wait there would block them."""
        return self._loop is not None and self._loop.is_this_thread

    @property
    def abandoned(self) -> bool:
        """Whether the wait for a call of the listener was given up."""
        return self._abandoned.done()

    def put(self, notification: N) -> None:
        """Queue a notification; never blocks."""
        self._mailbox.put(notification)

    def receive(self, source: str, *, notification: N) -> None:
        """`put` with the signature that blinker calls."""
        self.put(notification)

    def deliver(self) -> None:
        """Call the listener, in this thread, with all queued notifications. Does nothing if it has its own thread."""
        # A listener may call this again, through a poll of its own; the outer call delivers the rest.
        if self._thread is not None or not self._calling.acquire(blocking=False):
            return
        try:
            self._deliver_queued()
        finally:
            self._calling.release()

    def close(self) -> None:
        """Drop the queue and deliver nothing more, without waiting for a running call."""
        self._mailbox.close()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a running call and the thread. Return at once inside that call."""
        check_duration(timeout, "timeout")
        if self._thread is None or not self._thread.is_alive() or self.is_this_thread:
            return
        if self.is_this_loop or (self._loop is not None and not self._loop.is_running):
            self.abandon()  # the coroutine cannot continue during the wait
        self._thread.join(timeout)
        if self._thread.is_alive():
            _logger.warning("a listener did not return in time: %r", self.listener)
            self.abandon()

    def abandon(self) -> None:
        """Stop waiting for the listener's running coroutine."""
        if not self._abandoned.done():
            self._abandoned.set_result(None)

    def _run(self) -> None:
        while not self._mailbox.closed:
            self._mailbox.filled.wait()
            self._deliver_queued()

    def _deliver_queued(self) -> None:
        while (notification := self._mailbox.take()) is not None:
            try:
                result = self.listener(notification)
                if not inspect.isawaitable(result):
                    check_returned(result, "a listener")
                    self._returned()
                elif self._await(result):
                    self._returned()
            except BaseException as error:
                raise_interrupt(error, of_listener=True)
                self._failed(error)

    def _await(self, awaitable: Awaitable[object]) -> bool:
        """Run the awaitable on the loop; return False if it has not finished."""
        if self._loop is None:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise InvalidArgumentError(
                "the listener returned a coroutine, but no event loop ran at its registration; register it in a "
                "coroutine"
            )
        future = self._loop.run(awaitable)
        if self._loop.is_this_thread:
            future.add_done_callback(self._check_outcome)
            return False
        wait([future, self._abandoned], return_when=FIRST_COMPLETED)
        if future.done():
            future.result()
        return future.done()

    def _check_outcome(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._failed(error)
        elif not future.cancelled():
            self._returned()

    def _returned(self) -> None:
        """Called when a call of the listener has returned."""

    def _failed(self, error: BaseException) -> None:
        self._on_failure()
        _logger.error("a listener raised; it stays registered: %r", self.listener, exc_info=error)


class NotificationSystem:
    """Delivers each published notification to the listeners of its source and of its class or a base class.

    Publishing never blocks, and never raises because of a listener. Each listener has its own queue and thread. Threads
    may share the system.

    Args:
        queue_size: The capacity of each listener's queue. When it is full, the newest notification replaces the one
            before it, with ``gap=True``.
        threads: False to call the listeners in `deliver`, without threads.
    """

    def __init__(self, *, queue_size: int = DEFAULT_QUEUE_SIZE, threads: bool = True) -> None:
        check_count(queue_size, "queue_size")
        #: The number of listener calls that raised.
        self.failures = 0
        self._queue_size = queue_size
        self._threads = threads
        self._lock = threading.RLock()
        self._signals: dict[tuple[type, str], Signal] = {}
        self._subscriptions: dict[Subscription[Any], Signal] = {}
        self._leaving: list[Subscription[Any]] = []  # unregistered, and perhaps still in a call
        self._closed = False

    @property
    def subscriptions(self) -> Sequence[Subscription[Any]]:
        """Those of the registered listeners, in the order of their registration."""
        return tuple(self._subscriptions)

    @overload
    def register_listener(self, listener: Listener[N], *, source: str, kind: type[N]) -> Subscription[N]: ...

    @overload
    def register_listener(self, listener: Listener[Any], *, source: str) -> Subscription[Any]: ...

    def register_listener(
        self, listener: Listener[Any], *, source: str, kind: type[Notification] = Notification
    ) -> Subscription[Any]:
        """Call ``listener`` with each notification about ``source`` from now on. It is held strongly.

        Args:
            listener: A function, lambda, bound method or ``async def``. An ``async def`` runs on the event loop of the
                caller.
            source: The `Notification.source` to listen to.
            kind: A notification class. Instances of its subclasses are delivered too.

        Raises:
            InvalidArgumentError: The listener cannot be called with one notification.
            ClosedError: The system is closed.
        """
        check_type(source, str, "source")
        check_class(kind, Notification, "kind")
        with self._lock:
            if self._closed:
                raise ClosedError("the notification system is closed", source=source)
            subscription: Subscription[Any] = Subscription(
                listener,
                name=source,
                queue_size=self._queue_size,
                thread=self._threads,
                on_failure=self._count_failure,
            )
            signal = self._signals.setdefault((kind, source), Signal())
            # First: an interrupt may follow, and then it can still be unregistered.
            self._subscriptions[subscription] = signal
            try:
                # By default blinker holds receivers weakly.
                signal.connect(subscription.receive, weak=False)
                subscription.start()
            except BaseException:
                self.unregister(subscription)
                raise
            return subscription

    def unregister(self, subscription: Subscription[Any]) -> None:
        """Deliver nothing more to its listener. Unregistering twice is no error."""
        check_type(subscription, Subscription, "subscription")
        with self._lock:
            signal = self._subscriptions.get(subscription)
            if signal is not None:
                self._leaving = [s for s in self._leaving if not s.ended] + [subscription]
                subscription.close()
                signal.disconnect(subscription.receive)
                del self._subscriptions[subscription]  # last: an interrupted call can be repeated

    def publish(self, notification: Notification) -> None:
        """Queue ``notification`` for each listener of its source and class. Never blocks."""
        check_type(notification, Notification, "notification")
        with self._lock:
            for kind in type(notification).__mro__:
                signal = self._signals.get((kind, notification.source))
                if signal is not None:
                    signal.send(notification.source, notification=notification)

    def deliver(self) -> None:
        """Without threads: call the listeners, in this thread, with all queued notifications."""
        with self._lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.deliver()

    def close(self) -> None:
        """Unregister all listeners, and wait up to 5 s for running calls. Closing twice is no error."""
        self._close_until(Deadline(SystemClock(), CLOSE_TIMEOUT_SECONDS))

    def _close_until(self, deadline: Deadline) -> None:
        with self._lock:
            self._closed = True
            for subscription in list(self._subscriptions):
                self.unregister(subscription)
            leaving, self._leaving = self._leaving, []
        for subscription in leaving:
            subscription.join(deadline.remaining())

    def _count_failure(self) -> None:
        with self._lock:
            self.failures += 1


def check_listener(listener: Listener[Any], source: str, *, advice: str = "") -> None:
    """Raise `InvalidArgumentError` for what cannot be a listener to ``source``."""
    check_callable(listener, "a listener", may_await=True, source=source)
    check_takes(listener, "a listener", "notification", advice=advice, source=source)


def _running_loop() -> EventLoop | None:
    """Return the event loop that runs in this thread, if one does. Loading asyncio only to ask would take long."""
    if "asyncio" not in sys.modules:
        return None
    with loading():
        from .event_loop import running_loop

    return running_loop()
