"""Delivers notifications to listeners: one blinker signal for each notification class and source."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, Generic, overload

from blinker import Signal

from synchronizer import ClosedError, InvalidArgumentError, check_callable, check_returned, is_async
from synchronizer.arguments import check_class, check_count, check_duration, check_type
from synchronizer.threads.background import BackgroundThread

from .mailbox import Mailbox, N
from .notification import Notification

#: What a listener returns is ignored, except that a coroutine is awaited on the listener's loop.
Listener = Callable[[N], object]

DEFAULT_QUEUE_SIZE: Final = 1000
#: How long `close` waits for the call that a listener is in.
CLOSE_TIMEOUT_SECONDS: Final = 5.0

_logger = logging.getLogger(__name__)


class Subscription(Generic[N]):
    """One listener with its own queue, called by one thread: one call at a time, in the order of publication.

    A listener that raises is logged, ``on_failure`` is called, and it hears what comes next. A coroutine runs on the
    loop that was running when the listener was registered. Without ``thread``, `deliver` makes the calls.
    """

    def __init__(
        self, listener: Listener[N], *, name: str, queue_size: int, thread: bool, on_failure: Callable[[], None]
    ) -> None:
        check_count(queue_size, "queue_size")
        self.listener = listener
        self._on_failure = on_failure
        self._mailbox: Mailbox[N] = Mailbox(queue_size)
        self._loop = _running_loop()
        check_callable(listener, "a listener", may_await=True, name=name)
        if self._loop is None and is_async(listener):
            raise InvalidArgumentError(
                "an async listener runs on the event loop of its registration: register it in a coroutine", name=name
            )
        self._in_order = asyncio.Lock()  # first come, first served: keeps the order where nobody waits for a coroutine
        self._abandoned: Future[None] = Future()
        self._calling = threading.Lock()
        self._thread = BackgroundThread(self._run, name=f"listener of {name}") if thread else None
        if self._thread is not None:
            self._thread.start()

    @property
    def coalesced(self) -> int:
        """How many notifications gave way to newer ones because the listener was too slow."""
        return self._mailbox.coalesced

    @property
    def ended(self) -> bool:
        """Whether it is closed and its listener will not be called again, nor is in a call."""
        return self._mailbox.closed and (self._thread is None or not self._thread.is_alive())

    @property
    def is_this_thread(self) -> bool:
        """Whether it is asked in its own thread, which is in a call of the listener then."""
        return self._thread is threading.current_thread()

    @property
    def is_this_loop(self) -> bool:
        """Whether it is asked on the loop of its listener's coroutines, which stand still as long as that waits."""
        return self._loop is not None and self._loop is _running_loop()

    @property
    def abandoned(self) -> bool:
        """Whether a call of the listener was waited for in vain."""
        return self._abandoned.done()

    def put(self, notification: N) -> None:
        """Queue a notification; never blocks."""
        self._mailbox.put(notification)

    def receive(self, source: str, *, notification: N) -> None:
        """`put`, as blinker calls it."""
        self.put(notification)

    def deliver(self) -> None:
        """Call the listener, in this thread, with all that is queued; does nothing where a thread does it."""
        # A listener that comes here again, through a poll of its own, leaves the rest to the call that it is in.
        if self._thread is not None or not self._calling.acquire(blocking=False):
            return
        try:
            self._deliver_queued()
        finally:
            self._calling.release()

    def close(self) -> None:
        """Queue and deliver nothing more. The call that the listener is in is not waited for."""
        self._mailbox.close()

    def join(self, timeout: float) -> None:
        """Wait for the call that the listener is in, and for the thread. Returns at once in that call itself."""
        check_duration(timeout, "timeout")
        if self._thread is None or self.is_this_thread:
            return
        if self.is_this_loop or (self._loop is not None and not self._loop.is_running()):
            self.abandon()  # the coroutine cannot go on while it is waited for
        self._thread.join(timeout)
        if self._thread.is_alive():
            _logger.warning("a listener did not return within %s s: %r", timeout, self.listener)
            self.abandon()

    def abandon(self) -> None:
        """Wait no longer for the coroutine that the listener is in."""
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
            except (Exception, SystemExit) as error:
                self._failed(error)

    def _await(self, awaitable: Awaitable[object]) -> bool:
        """Run it on the loop; False if it is not waited for to its end."""
        if self._loop is None:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise InvalidArgumentError("the listener returned a coroutine, but no event loop ran at its registration")
        in_order = self._await_in_order(awaitable)
        try:
            future = asyncio.run_coroutine_threadsafe(in_order, self._loop)
        except RuntimeError:  # the loop is closed
            in_order.close()
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise
        if self._loop is _running_loop():
            future.add_done_callback(self._check_outcome)
            return False
        wait([future, self._abandoned], return_when=FIRST_COMPLETED)
        if future.done():
            future.result()
        return future.done()

    async def _await_in_order(self, awaitable: Awaitable[object]) -> None:
        async with self._in_order:
            await awaitable

    def _check_outcome(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._failed(error)
        elif not future.cancelled():
            self._returned()

    def _returned(self) -> None:
        """The listener has heard a notification."""

    def _failed(self, error: BaseException) -> None:
        self._on_failure()
        _logger.error("a listener raised; it stays registered: %r", self.listener, exc_info=error)


class NotificationSystem:
    """Tells each published notification to the listeners of its source and class, or of a class it derives from.

    Publishing never blocks and never raises because of a listener. Each listener has a queue of ``queue_size`` and,
    unless ``threads`` is False, a thread of its own that ends with its registration. Threads may share the system.
    """

    def __init__(self, *, queue_size: int = DEFAULT_QUEUE_SIZE, threads: bool = True) -> None:
        check_count(queue_size, "queue_size")
        #: How often listeners raised.
        self.failures = 0
        self._queue_size = queue_size
        self._threads = threads
        self._lock = threading.RLock()
        self._signals: dict[tuple[type, str], Signal] = {}
        self._subscriptions: dict[Subscription[Any], Signal] = {}
        self._leaving: list[Subscription[Any]] = []  # unregistered, and perhaps still in a call
        self._closed = False

    @overload
    def register_listener(self, listener: Listener[N], *, source: str, kind: type[N]) -> Subscription[N]: ...

    @overload
    def register_listener(self, listener: Listener[Any], *, source: str) -> Subscription[Any]: ...

    def register_listener(
        self, listener: Listener[Any], *, source: str, kind: type[Notification] = Notification
    ) -> Subscription[Any]:
        """Tell ``listener`` each notification of class ``kind`` about ``source`` from now on. It is held strongly."""
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
            # Unless told otherwise blinker holds receivers weakly.
            signal.connect(subscription.receive, weak=False)
            self._subscriptions[subscription] = signal
            return subscription

    def unregister(self, subscription: Subscription[Any]) -> None:
        """Tell its listener nothing more. Unregistering twice is no error."""
        check_type(subscription, Subscription, "subscription")
        with self._lock:
            signal = self._subscriptions.pop(subscription, None)
            if signal is not None:
                signal.disconnect(subscription.receive)
                subscription.close()
                self._leaving = [s for s in self._leaving if not s.ended] + [subscription]

    def publish(self, notification: Notification) -> None:
        """Queue ``notification`` for each listener of its source and class; never blocks."""
        check_type(notification, Notification, "notification")
        with self._lock:
            for kind in type(notification).__mro__:
                signal = self._signals.get((kind, notification.source))
                if signal is not None:
                    signal.send(notification.source, notification=notification)

    def deliver(self) -> None:
        """Without threads: call the listeners, in this thread, with all that is queued."""
        with self._lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.deliver()

    def close(self) -> None:
        """Tell nothing more; waits a few seconds at most for the calls that listeners are in. Twice is no error."""
        with self._lock:
            self._closed = True
            for subscription in list(self._subscriptions):
                self.unregister(subscription)
            leaving, self._leaving = self._leaving, []
        for subscription in leaving:
            subscription.join(CLOSE_TIMEOUT_SECONDS)

    def _count_failure(self) -> None:
        with self._lock:
            self.failures += 1


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
