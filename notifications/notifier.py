"""`PollingNotifier`: looks at a state at intervals, or as soon as its log grows, and tells listeners what changed.

It folds the log: ``detect`` sees every transition that the synchronizer applied, one by one and in order, so that a
split and a merge between two looks are two notifications. What each listener hears, and that it hears it once, is
decided under one lock, the registration of listeners included. Listeners are called outside of it.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, Generic, Self, TypeVar

from apscheduler.schedulers.base import BaseScheduler

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    Revision,
    State,
    StateSynchronizer,
    Transition,
    TransitionFeed,
    check_callable,
    check_returned,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.clock import is_manual

from .background import BackgroundPolling
from .durable import DEFAULT_TURN_TIMEOUT_SECONDS, DurableListening, attribute_of, forget
from .mailbox import Mailbox, N
from .notification import PRESENT_VALUE, SEVERAL_CHANGES, Change
from .system import CLOSE_TIMEOUT_SECONDS, DEFAULT_QUEUE_SIZE, Listener, NotificationSystem, Subscription

S = TypeVar("S", bound=State)
R = TypeVar("R")

DEFAULT_INTERVAL_SECONDS: Final = 2.0


class PollingNotifier(ABC, Generic[S, N]):
    """Tells listeners what `detect` finds in each change of a synchronizer's state.

    A new listener hears the present value once, then each change once, in order of revision; one that raises stops
    neither the others nor the polling. Listeners run in threads of their own, one call of each at a time. The first
    listener starts the polling, the last one ends it, and it starts again. Polls come every ``interval_seconds``, and
    as soon as the store tells that the log has grown; a failing one is logged and repeated after a growing pause. The
    synchronizer is borrowed and never closed.

    ``source`` is what the notifications are about, by default the synchronizer's name. ``queue_size`` is how many of
    them a slow listener may be behind; the newest then stands for those that it misses, with ``gap=True``.
    ``scheduler`` takes the place of the one that all notifiers of the process share, and is neither started nor
    stopped. On a clock that ``is_manual`` nothing runs in the background: `poll` does everything in the thread of its
    caller. ``turn_timeout_seconds`` is how long a durable listener is silent when the process in which it heard has
    died; give the same in all processes.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[S],
        *,
        source: str | None = None,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        queue_size: int = DEFAULT_QUEUE_SIZE,
        scheduler: BaseScheduler | None = None,
        turn_timeout_seconds: float = DEFAULT_TURN_TIMEOUT_SECONDS,
    ) -> None:
        check_type(synchronizer, StateSynchronizer, "synchronizer")
        check_type(source, str, "source", or_none=True)
        check_type(scheduler, BaseScheduler, "scheduler", or_none=True)
        check_duration(interval_seconds, "interval_seconds", above_zero=True, finite=True)
        check_duration(turn_timeout_seconds, "turn_timeout_seconds", above_zero=True, finite=True)
        check_count(queue_size, "queue_size")
        check_callable(self.detect, "detect", may_yield=True, notifier=type(self).__name__)
        check_callable(self.before_poll, "before_poll", notifier=type(self).__name__)
        check_callable(self.watched, "watched", notifier=type(self).__name__)
        self.synchronizer = synchronizer
        self.source = synchronizer.name if source is None else source
        self._clock = synchronizer.clock
        self._queue_size = queue_size
        self._turn_timeout_seconds = turn_timeout_seconds
        self._in_background = not is_manual(self._clock)
        self._system = NotificationSystem(queue_size=queue_size, threads=self._in_background)
        self._polling = BackgroundPolling(
            self.poll,
            self._known,
            name=self.source,
            store=synchronizer.store,
            clock=self._clock,
            interval_seconds=interval_seconds,
            scheduler=scheduler,
        )

        self._order = threading.RLock()  # guards what follows, and with it the order of what is told
        self._feed: TransitionFeed[S] | None = None  # while there is somebody to tell
        self._subscriptions: list[Subscription[N]] = []
        self._durables: dict[str, DurableListening[S, N]] = {}  # by the attributes of their names
        self._leaving: list[DurableListening[S, N]] = []  # stopped, and perhaps still in a call
        self._durable_failures = 0
        self._waiting: Mailbox[N] | None = None  # what `wait` returns next
        self._state: S | None = None  # as it was told last
        self._revision = Revision(0, 0)
        self._drained = Revision(0, 0)
        self._failed: Transition[S] | None = None  # newest one that `detect` failed on
        self._missed = False  # changes that were not seen one by one, and not told of either
        self._closed = False
        self._process_id = os.getpid()

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def detect(self, before: S | None, after: S, change: Change) -> Iterable[N]:
        """What there is to tell about the step from ``before`` to ``after``; None as ``before`` is the first look.

        Runs for every change in order of revision, and again with None for each new listener. Quick and pure. If it
        raises, the step is tried again by the next poll, together with what has come since (then with
        ``change.gap``).
        """

    def before_poll(self) -> None:
        """Work before each poll, such as to record in the state what was seen elsewhere. May use the store.

        An error counts as one of the poll, but keeps nothing from being told that is in the log.
        """

    def watched(self) -> Mapping[str, int]:
        """Further segments of the store whose growth asks for a poll at once, with the length that is known of each.

        Asked after each poll, which is to take up what has grown: `before_poll` is the place.
        """
        return {}

    # ------------------------------------------------------------------ who listens

    def register_listener(self, listener: Listener[N], *, durable: str | None = None) -> Callable[[], None]:
        """Tell ``listener`` the present value and every change from now on; returns the function that ends it.

        Functions, lambdas, bound methods and ``async def`` are listeners, and are held strongly. An ``async def`` runs
        on the loop that runs now. Registering one again while it is registered changes nothing.

        ``durable`` is a name under which it is remembered what was heard, that is, which calls returned. Whoever
        listens under that name, in this process or another, after a restart or not, goes on from there; of all that
        do, one at a time hears. It hears every change at least once and in order, and recognises by the ``key`` of a
        notification one that it has heard. One that raises is told the same again after a growing pause. Where the
        log was compacted past what it heard, one notification says ``gap`` and tells the present value.
        """
        self._check_open()
        if durable is not None:
            return self._register_durable(listener, durable)
        with self._order, self._following():
            subscription = self._find(listener)
            if subscription is None:
                present = self._present_value()
                subscription = self._system.register_listener(listener, source=self.source)
                self._subscriptions.append(subscription)
                for notification in present:
                    subscription.put(notification)
        self._system.deliver()
        registered = subscription
        return lambda: self._unregister(registered)

    def listen(self, listener: Callable[[N], R]) -> Callable[[N], R]:
        """`register_listener` as a decorator."""
        self.register_listener(listener)
        return listener

    def unregister_listener(self, listener: Listener[N]) -> None:
        """Tell ``listener`` nothing more. No error if it is not registered."""
        with self._order:
            subscription = self._find(listener)
            if subscription is not None:
                self._unregister(subscription)
            for attribute, listening in list(self._durables.items()):
                if listening.listener == listener:
                    self._unregister_durable(attribute, listening)

    def forget_listener(self, durable: str) -> None:
        """Remove what is remembered under a durable name that is no longer used. No error if there is nothing."""
        attribute = attribute_of(type(self), durable)
        self._check_open()
        if attribute in self._durables:
            raise InvalidArgumentError("a listener has this name; unregister it first", name=durable)
        forget(self.synchronizer, attribute)

    def unregister_all_listeners(self) -> None:
        """Tell nobody anything more; a `wait` in another thread raises `ClosedError`."""
        with self._order:
            for subscription in self._subscriptions:
                self._system.unregister(subscription)
            self._subscriptions.clear()
            for attribute, listening in list(self._durables.items()):
                self._unregister_durable(attribute, listening)
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None
            self._end_if_unheard()

    @property
    def listener_failures(self) -> int:
        """How often listeners raised."""
        return self._system.failures + self._durable_failures

    def wait(self, *, timeout: float | None = None) -> N:
        """The next notification: the present value first, then each change once, whoever of the callers gets it.

        Keeps listening between the calls, until `unregister_all_listeners` or `close`. `DeadlineExceededError`, a
        `TimeoutError`, if there was nothing within ``timeout`` (by default the synchronizer's).
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
                raise ClosedError("the listeners were unregistered while waiting", source=self.source)
            if deadline.passed:
                raise DeadlineExceededError("there was nothing to tell in time", source=self.source)
            self._clock.wait(mailbox.filled, deadline.remaining(1.0))

    # ------------------------------------------------------------------ telling

    def poll(self) -> None:
        """Look for changes now, in this thread, and queue them for the listeners. Raises what went wrong."""
        self._check_open()
        try:
            check_returned(self.before_poll(), "before_poll", source=self.source)  # type: ignore[func-returns-value]
        finally:
            self._fetch_and_tell()

    def step(self) -> float:
        """`poll` once. A poll is due whenever the log grows, and at no known time, so it returns inf."""
        self.poll()
        return math.inf

    def close(self) -> None:
        """Unregister all and end the threads, waiting a few seconds at most for what they are in. Twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        with self._order:
            self._closed = True
            self.unregister_all_listeners()
        self._polling.join(CLOSE_TIMEOUT_SECONDS)
        self._system.close()
        for listening in self._leaving:
            listening.join(CLOSE_TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fetch_and_tell(self) -> None:
        with suppress(NotFoundError):  # a state that was deleted has nothing to tell, until it is there again
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
        """Tell all that was applied since the last time; the error if `detect` failed. The lock is held."""
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
        return error

    def _tell_transition(self, transition: Transition[S], *, gap: bool) -> None:
        told: Sequence[N] = ()
        if self._subscriptions or self._waiting is not None:
            # All of them, before the first is told: half of them would be repeated.
            told = self._find_out(self._state, transition, gap=gap, missed=self._missed)
            for notification in told:
                self._system.publish(notification)
                if self._waiting is not None:
                    self._waiting.put(notification)
        self._missed = (gap or self._missed) and not told
        self._state, self._revision = transition.after, transition.revision

    def _find_out(self, before: S | None, transition: Transition[S], *, gap: bool, missed: bool) -> Sequence[N]:
        """What there is to tell of the step from ``before`` to what the transition leads to."""
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
        """Register somebody inside: the state is followed, and told up to what this process has applied."""
        self._check_open()
        if self._feed is None:
            self._begin()
        # An error comes up again in the next poll, which has somewhere to report it.
        self._tell()
        try:
            yield
        finally:
            self._end_if_unheard()

    def _begin(self) -> None:
        self._state, self._failed, self._missed = None, None, False
        self._drained = self.synchronizer.revision
        self._feed = self.synchronizer.transitions()
        if self._in_background:
            try:
                self._polling.start()
            except BaseException:
                self._feed.close()
                self._feed = None
                raise

    def _end_if_unheard(self) -> None:
        if self._feed is not None and not self._is_heard:
            self._feed.close()
            self._feed = None
            self._polling.stop()

    def _present_value(self) -> Sequence[N]:
        if self._state is None:
            return ()
        return self._detected(None, self._state, self._make_change(self._revision, PRESENT_VALUE))

    def _register_durable(self, listener: Listener[N], name: str) -> Callable[[], None]:
        attribute = attribute_of(type(self), name)
        with self._order, self._following():
            present = self._durables.get(attribute)
            if present is not None and present.listener != listener:
                raise InvalidArgumentError("another listener has this name; unregister it first", name=name)
            listening = present
            if listening is None:
                listening = self._durables[attribute] = DurableListening(
                    listener,
                    self.synchronizer,
                    self._find_out_durably,
                    attribute=attribute,
                    timeout_seconds=self._turn_timeout_seconds,
                    thread=self._in_background,
                    on_failure=self._count_failure,
                )
        registered = listening
        if present is None:
            try:
                registered.start()
            except BaseException:
                self._unregister_durable(attribute, registered)
                raise
        return lambda: self._unregister_durable(attribute, registered)

    def _find_out_durably(self, transition: Transition[S], missed: bool) -> Sequence[N]:
        # What was before a gap may have been told by another process, and is not known here.
        before = None if transition.gap else transition.before
        return self._find_out(before, transition, gap=transition.gap, missed=missed)

    def _unregister_durable(self, attribute: str, listening: DurableListening[S, N]) -> None:
        with self._order:
            if self._durables.get(attribute) is listening:
                del self._durables[attribute]
                self._leaving = [each for each in self._leaving if not each.ended] + [listening]
                self._end_if_unheard()
        listening.stop()

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

    def _find(self, listener: Listener[N]) -> Subscription[N] | None:
        return next((s for s in self._subscriptions if s.listener == listener), None)

    def _unregister(self, subscription: Subscription[N]) -> None:
        with self._order:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                self._system.unregister(subscription)
                self._end_if_unheard()

    def _known(self) -> Mapping[str, int]:
        """The lengths of the watched segments as far as they were told of."""
        length = self.synchronizer.applied_length
        # What was applied here may not have been told yet. No segment has a negative length, so that one has "grown".
        told = self._drained == self.synchronizer.revision
        watched = self.watched()
        check_returned(watched, "watched", source=self.source)
        return {self.synchronizer.segment: length if told else -length - 1, **watched}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the notifier is closed", source=self.source)
        if os.getpid() != self._process_id:  # where its threads are not, and its lock may be held for ever
            raise ClosedError("the notifier belongs to the parent process; open one after the fork", source=self.source)

    def _detected(self, before: S | None, after: S, change: Change) -> Sequence[N]:
        found = self.detect(before, after, change)
        check_returned(found, "detect", may_yield=True, source=self.source)
        return [notification.at(index) for index, notification in enumerate(found)]
