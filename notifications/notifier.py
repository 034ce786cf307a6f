"""`PollingNotifier`: polls a state at intervals, and as soon as its log grows, and tells listeners what changed.

``detect`` sees every transition that the synchronizer applied, one by one and in order, so that a split and a merge
between two polls are two notifications. One lock orders registrations and publications, so that each listener receives
each notification once. Listeners are called outside of the lock.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    Revision,
    State,
    StateSynchronizer,
    SystemClock,
    Transition,
    TransitionFeed,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.callables import check_callable, check_returned
from synchronizer.clock import is_manual
from synchronizer.threads.loading import loading

from .background import BackgroundPolling
from .durable import DEFAULT_ROLE_TIMEOUT_SECONDS, DurableListening, attribute_of, forget
from .mailbox import Mailbox, N
from .notification import OBSERVATION, PRESENT_VALUE, SEVERAL_CHANGES, Change
from .system import (
    CLOSE_TIMEOUT_SECONDS,
    DEFAULT_QUEUE_SIZE,
    Listener,
    NotificationSystem,
    Subscription,
    check_listener,
)

if TYPE_CHECKING:
    from apscheduler.schedulers.base import BaseScheduler

S = TypeVar("S", bound=State)
R = TypeVar("R")

DEFAULT_INTERVAL_SECONDS: Final = 2.0


class PollingNotifier(ABC, Generic[S, N]):
    """Tells listeners what `detect` finds in each change of a synchronizer's state.

    A new listener hears the present value once, then each change once, in order of revision. An error of a listener
    stops neither the others nor the polling. Each listener has a thread of its own, with one call at a time.

    The first listener starts the polling, and the last one to unregister ends it; a later one starts it again. Polls
    run every ``interval_seconds``, and as soon as the store reports that the log has grown. A failed poll is logged and
    retried with a backoff. On a clock that ``is_manual`` nothing runs in the background: `poll` does all the work in
    the thread of its caller.

    Args:
        synchronizer: Keeps the state. It is borrowed and never closed.
        source: The subject of the notifications; by default the synchronizer's name.
        interval_seconds: The time between polls; above 0.
        queue_size: How many notifications a slow listener may be behind. Then the newest one stands for those that it
            misses, with ``gap=True``.
        scheduler: An APScheduler for the polls, which you start and stop, with a job store in memory; by default one
            that all notifiers of the process share.
        role_timeout_seconds: Another process takes over a durable listener whose process has been silent for this
            long. Give the same in all processes.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[S],
        *,
        source: str | None = None,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        queue_size: int = DEFAULT_QUEUE_SIZE,
        scheduler: BaseScheduler | None = None,
        role_timeout_seconds: float = DEFAULT_ROLE_TIMEOUT_SECONDS,
    ) -> None:
        check_type(synchronizer, StateSynchronizer, "synchronizer")
        check_type(source, str, "source", or_none=True)
        if scheduler is not None:
            _check_scheduler(scheduler)
        check_duration(interval_seconds, "interval_seconds", above_zero=True, finite=True)
        check_duration(role_timeout_seconds, "role_timeout_seconds", above_zero=True, finite=True)
        check_count(queue_size, "queue_size")
        self.synchronizer = synchronizer
        self.source = synchronizer.name if source is None else source
        #: What closes the notifier. It stays in memory as long as the threads of the notifier run.
        self.owner: object = None
        self._clock = synchronizer.clock
        self._queue_size = queue_size
        self._role_timeout_seconds = role_timeout_seconds
        self._in_background = not is_manual(self._clock)
        self._system = NotificationSystem(queue_size=queue_size, threads=self._in_background)
        self._polling = BackgroundPolling(
            self.poll,
            self._known,
            name=f"{type(self).__name__} of {self.source}",
            store=synchronizer.store,
            clock=self._clock,
            interval_seconds=interval_seconds,
            scheduler=scheduler,
        )

        self._order = threading.RLock()  # guards the attributes below, and so the order of notifications
        self._feed: TransitionFeed[S] | None = None  # while there are listeners
        self._durables: dict[str, DurableListening[S, N]] = {}  # by the attributes of their names
        self._leaving: list[DurableListening[S, N]] = []  # stopped, and perhaps still in a call
        self._durable_failures = 0
        self._waiting: Mailbox[N] | None = None  # the queue of `wait`
        self._state: S | None = None  # the state that was told last
        self._revision = Revision(0, 0)
        self._drained = Revision(0, 0)
        self._failed: Transition[S] | None = None  # the newest one on which `detect` failed
        self._observations = 0  # how many notifications `look` has returned
        self._missed = False  # changes were not seen one by one, and no notification has reported it yet
        self._closed = False
        self._process_id = os.getpid()
        # Last, because their errors show this object.
        check_callable(self.detect, "detect", may_yield=True, notifier=type(self).__name__)
        check_callable(self.look, "look", may_yield=True, notifier=type(self).__name__)
        check_callable(self.before_poll, "before_poll", notifier=type(self).__name__)
        check_callable(self.watched, "watched", notifier=type(self).__name__)

    def __repr__(self) -> str:
        listeners = len(self._subscriptions) + len(self._durables)
        return f"{type(self).__name__}({self.source!r}, {listeners} listeners)"

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def detect(self, before: S | None, after: S, change: Change) -> Iterable[N]:
        """Return the notifications for the step from ``before`` to ``after``. Must be fast and pure.

        Runs for every change in order of revision, and once for each new listener. If it raises, the next poll tries
        the step again, together with newer changes (then with ``change.gap``).

        Args:
            before: The state before the change. None for the present value, which a new listener hears first, and a
                durable listener also after a gap.
            after: The state after the change.
            change: Pass it to each `Notification`.
        """

    def look(self, state: S, change: Change) -> Iterable[N]:
        """Return notifications that no change of the log causes, such as of what `before_poll` measured.

        Runs at each poll, after `detect`, while there are listeners. Not for durable listeners.

        Args:
            state: The state that was told last.
            change: Pass it to each `Notification`. Its cause is `OBSERVATION`.
        """
        return ()

    def before_poll(self) -> None:
        """Do work before each poll, such as recording external observations in the state. May use the store.

        An error counts as an error of the poll, but changes in the log are still told.
        """

    def watched(self) -> Mapping[str, int]:
        """Return further segments whose growth causes a poll at once, each with its known length.

        Called after each poll. Read the new data in `before_poll`, and then return the new length.
        """
        return {}

    # ------------------------------------------------------------------ listeners

    def register_listener(self, listener: Listener[N], *, durable: str | None = None) -> Callable[[], None]:
        """Tell ``listener`` the present value and every change from now on; return a function that unregisters it.

        A durable listener continues where its name stopped, in this process or another, also after a restart. Of all
        listeners with a name, one at a time is called. It hears every change at least once and in order; the ``key`` of
        a notification identifies a repeated one. If it raises, the same notification is delivered again after a
        backoff. If the log was compacted past its position, one notification with ``gap`` tells the present value.

        Args:
            listener: A function, lambda, bound method or ``async def``; held strongly. An ``async def`` runs on the
                event loop of the caller. Registering a registered listener again changes nothing.
            durable: The durable name: up to 100 letters, digits and ``. _ -``. None for a listener that is not durable.

        Raises:
            InvalidArgumentError: The listener cannot be called with one notification, the durable name is invalid, or
                another listener of this notifier has it.
            ClosedError: The notifier is closed.
        """
        self._check_open()
        if durable is not None:
            return self._register_durable(listener, durable)
        with self._order, self._following():
            registered = self._find(listener) or self._subscribed(listener)
        self._system.deliver()
        return lambda: self._unregister(registered)

    def listen(self, listener: Callable[[N], R]) -> Callable[[N], R]:
        """`register_listener` as a decorator."""
        self.register_listener(listener)
        return listener

    def unregister_listener(self, listener: Listener[N]) -> None:
        """Unregister ``listener``. No error if it is not registered.

        Raise `InvalidArgumentError` for what cannot be a listener, such as the function that `register_listener`
        returned: call that one instead.
        """
        check_listener(listener, self.source, advice=", or call it if register_listener returned it")
        with self._order:
            subscription = self._find(listener)
            if subscription is not None:
                self._unregister(subscription)
            for attribute, listening in list(self._durables.items()):
                if listening.listener == listener:
                    self._unregister_durable(attribute, listening)

    def forget_listener(self, durable: str) -> None:
        """Remove the position of a durable name that is no longer used. No error if there is none.

        Raise `InvalidArgumentError` if a listener of this notifier still has the name.
        """
        attribute = attribute_of(type(self), durable)
        self._check_open()
        if attribute in self._durables:
            raise InvalidArgumentError("a listener has this name; unregister it first", name=durable)
        forget(self.synchronizer, attribute)

    def unregister_all_listeners(self) -> None:
        """Unregister all listeners. A `wait` in another thread raises `ClosedError`."""
        with self._order:
            for subscription in self._subscriptions:
                self._system.unregister(subscription)
            for attribute, listening in list(self._durables.items()):
                self._unregister_durable(attribute, listening)
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None
            self._end_if_unheard()

    @property
    def listener_failures(self) -> int:
        """The number of listener calls that raised."""
        return self._system.failures + self._durable_failures

    def wait(self, *, timeout: float | None = None) -> N:
        """Wait for the next notification: the present value first, then each change once.

        Each notification goes to one of the calls. The notifier keeps listening between them, until
        `unregister_all_listeners` or `close`.

        Args:
            timeout: Seconds to wait; by default the synchronizer's timeout.

        Raises:
            DeadlineExceededError: There was no notification in time. It is a `TimeoutError`.
            ClosedError: The notifier is closed, or another thread unregistered all listeners.
        """
        deadline = Deadline(self._clock, self.synchronizer.timeout if timeout is None else timeout)
        mailbox = self._listen_by_waiting()
        while True:
            if not self._in_background:
                self.poll()
            notification = mailbox.take()
            if notification is not None:
                return notification
            if mailbox.closed:
                raise ClosedError("the listeners were unregistered during the wait", source=self.source)
            if deadline.passed:
                raise DeadlineExceededError("no notification came in time", source=self.source)
            self._clock.wait(mailbox.filled, deadline.remaining(1.0))

    # ------------------------------------------------------------------ telling

    def poll(self) -> None:
        """Look for changes now, in this thread, and queue them for the listeners. Raise any error of the poll."""
        self._check_open()
        try:
            check_returned(self.before_poll(), "before_poll", source=self.source)  # type: ignore[func-returns-value]
        finally:
            self._fetch_and_tell()

    def step(self) -> float:
        """`poll` once. Return inf: a poll is due when the log grows, which is at no known time."""
        self.poll()
        return math.inf

    def close(self) -> None:
        """Unregister all listeners and end the threads. Closing twice is no error.

        Waits up to 5 s for the running poll and the running listeners. What is queued is dropped: a durable listener
        hears it when its name is registered again.
        """
        self._close_until(Deadline(SystemClock(), CLOSE_TIMEOUT_SECONDS))  # threads end in real time, on every clock

    def _close_until(self, deadline: Deadline) -> None:
        if os.getpid() != self._process_id:
            return  # a forked child: the threads belong to the parent
        with self._order:
            self._closed = True
            self.unregister_all_listeners()
        self._polling.join(deadline.remaining())
        self._system._close_until(deadline)
        for listening in self._leaving:
            listening.join(deadline.remaining())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fetch_and_tell(self) -> None:
        with suppress(NotFoundError):  # a deleted state has nothing to tell until it is created again
            self.synchronizer.fetch_updates()
        with self._order:
            error = self._tell()
            durables = list(self._durables.values())
        self._system.deliver()
        for listening in durables:
            listening.look()
        if error is not None:
            raise error

    def _tell(self) -> Exception | None:
        """Tell all changes applied since the last call; return the error if `detect` failed. Lock held."""
        try:
            return self._tell_drained()
        except BaseException:  # interrupted: the next call tells what was drained, as one change with a gap
            if self._feed is not None:
                self._feed = self.synchronizer.transitions()
                self._failed = Transition(None, self._state, self._revision)
            raise

    def _tell_drained(self) -> Exception | None:
        if self._feed is None:
            return None
        error: Exception | None = None
        drained = list(self._feed.drain())
        skipped = self._failed is not None and bool(drained)
        transitions = drained or ([self._failed] if self._failed is not None else [])
        for transition in transitions:
            self._drained = transition.revision
            try:
                self._tell_transition(transition, gap=transition.gap or skipped)
                self._failed, skipped = None, False
            except Exception as raised:
                error, self._failed, skipped = raised, transition, True
        if error is None and self._state is not None and (self._subscriptions or self._waiting is not None):
            try:
                self._publish(self._observed(self._state))
            except Exception as raised:
                error = raised
        return error

    def _observed(self, state: S) -> Sequence[N]:
        observed = self.look(state, self._make_change(self._revision, OBSERVATION))
        check_returned(observed, "look", may_yield=True, source=self.source)
        found = [notification.at(index) for index, notification in enumerate(observed, self._observations + 1)]
        self._observations += len(found)
        return found

    def _publish(self, notifications: Iterable[N]) -> None:
        for notification in notifications:
            self._system.publish(notification)
            if self._waiting is not None:
                self._waiting.put(notification)

    def _tell_transition(self, transition: Transition[S], *, gap: bool) -> None:
        told: Sequence[N] = ()
        if self._subscriptions or self._waiting is not None:
            # Detect all before telling the first: if `detect` fails halfway, the first ones would be repeated.
            told = self._find_out(self._state, transition, gap=gap, missed=self._missed)
            self._publish(told)
        self._missed = (gap or self._missed) and not told
        self._state, self._revision = transition.after, transition.revision

    def _find_out(self, before: S | None, transition: Transition[S], *, gap: bool, missed: bool) -> Sequence[N]:
        """Return the notifications of the step from ``before`` to the state after the transition."""
        if transition.after is None:
            return ()
        change = self._change(before, transition, gap=gap, missed=missed)
        return self._detected(before, transition.after, change)

    def _change(self, before: S | None, transition: Transition[S], *, gap: bool, missed: bool) -> Change:
        if before is None:
            return self._make_change(transition.revision, PRESENT_VALUE, gap=gap or missed)
        if gap:
            return self._make_change(transition.revision, SEVERAL_CHANGES, gap=True)
        cause = ", ".join(update.tag for update in transition.updates)
        return self._make_change(transition.revision, cause, updates=transition.updates, gap=missed)

    def _make_change(self, revision: Revision, cause: str, **others: Any) -> Change:
        seen_at = datetime.fromtimestamp(self._clock.time(), UTC)
        return Change(source=self.source, revision=revision, cause=cause, seen_at=seen_at, **others)

    # ------------------------------------------------------------------ beginning and ending

    @property
    def _is_heard(self) -> bool:
        return bool(self._subscriptions) or bool(self._durables) or self._waiting is not None

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Follow the state while the block registers a listener, and first tell all changes applied here."""
        self._check_open()
        try:
            if self._feed is None:
                self._begin()
            # An error occurs again in the next poll, which reports it.
            self._tell()
            yield
        finally:
            self._end_if_unheard()

    def _begin(self) -> None:
        self._state, self._failed, self._missed = None, None, False
        self._drained = self.synchronizer.revision
        self._feed = self.synchronizer.transitions()
        if self._in_background:
            self._polling.start()

    def _end_if_unheard(self) -> None:
        if self._feed is not None and not self._is_heard:
            self._polling.stop()
            self._feed.close()
            self._feed = None

    def _present_value(self) -> Sequence[N]:
        if self._state is None:
            return ()
        return self._detected(None, self._state, self._make_change(self._revision, PRESENT_VALUE))

    def _register_durable(self, listener: Listener[N], name: str) -> Callable[[], None]:
        attribute = attribute_of(type(self), name)
        present = registered = None
        try:
            with self._order, self._following():
                present = self._durables.get(attribute)
                if present is not None and present.listener != listener:
                    raise InvalidArgumentError("another listener has this name; unregister it first", name=name)
                registered = present or self._listening_durably(listener, attribute)
                self._durables[attribute] = registered
            if present is None:
                registered.start()
        except BaseException:
            if present is None and registered is not None:
                self._unregister_durable(attribute, registered)
            raise
        begun = registered
        return lambda: self._unregister_durable(attribute, begun)

    def _listening_durably(self, listener: Listener[N], attribute: str) -> DurableListening[S, N]:
        return DurableListening(
            listener,
            self.synchronizer,
            self._find_out_durably,
            attribute=attribute,
            timeout_seconds=self._role_timeout_seconds,
            thread=self._in_background,
            on_failure=self._count_failure,
        )

    def _find_out_durably(self, transition: Transition[S], missed: bool) -> Sequence[N]:
        # Another process may have told the state before a gap, which is not known here.
        before = None if transition.gap else transition.before
        return self._find_out(before, transition, gap=transition.gap, missed=missed)

    def _unregister_durable(self, attribute: str, listening: DurableListening[S, N]) -> None:
        listening.stop()  # first: an interrupted call can be repeated
        with self._order:
            if self._durables.get(attribute) is listening:
                self._leaving = [each for each in self._leaving if not each.ended] + [listening]
                del self._durables[attribute]
                self._end_if_unheard()

    def _count_failure(self) -> None:
        with self._order:
            self._durable_failures += 1

    def _listen_by_waiting(self) -> Mailbox[N]:
        self._check_open()
        with self._order, self._following():
            if self._waiting is None:
                present = self._present_value()
                self._waiting = Mailbox(self._queue_size)
                for notification in present:
                    self._waiting.put(notification)
            return self._waiting

    @property
    def _subscriptions(self) -> Sequence[Subscription[N]]:
        return self._system.subscriptions

    def _subscribed(self, listener: Listener[N]) -> Subscription[N]:
        """Register the listener, which hears the present value first. Lock held."""
        present = self._present_value()
        try:
            subscription = self._system.register_listener(listener, source=self.source)
            for notification in present:
                subscription.put(notification)
        except BaseException:  # interrupted: it would hear the changes, but not the present value
            if (registered := self._find(listener)) is not None:
                self._system.unregister(registered)
            raise
        return subscription

    def _find(self, listener: Listener[N]) -> Subscription[N] | None:
        return next((s for s in self._subscriptions if s.listener == listener), None)

    def _unregister(self, subscription: Subscription[N]) -> None:
        with self._order:
            self._system.unregister(subscription)
            self._end_if_unheard()

    def _known(self) -> Mapping[str, int]:
        """Return the lengths of the watched segments up to which changes were told."""
        length = self.synchronizer.applied_length
        # Changes applied here may not be told yet. A negative length differs from any real one and causes a poll.
        told = self._drained == self.synchronizer.revision
        watched = self.watched()
        check_returned(watched, "watched", source=self.source)
        return {self.synchronizer.segment: length if told else -length - 1, **watched}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the notifier is closed", source=self.source)
        if os.getpid() != self._process_id:  # a child has no such threads, and the lock may be held for ever
            raise ClosedError(
                "the notifier belongs to the parent process; open another after the fork", source=self.source
            )

    def _detected(self, before: S | None, after: S, change: Change) -> Sequence[N]:
        found = self.detect(before, after, change)
        check_returned(found, "detect", may_yield=True, source=self.source)
        return [notification.at(index) for index, notification in enumerate(found)]


def _check_scheduler(scheduler: object) -> None:
    with loading():
        from apscheduler.schedulers.base import BaseScheduler

    check_type(scheduler, BaseScheduler, "scheduler", or_none=True)
