"""`DurableListening`: a listener that continues where its name stopped, after a restart and in any process.

Of all processes that listen under a name, only the holder of an `ExclusiveRole` calls its listener. The role's payload
is the position: the last notification that was processed. It is stored after each call that returns, before the next
one begins. The next holder reads the state's log from there, so a crash loses nothing and repeats at most the calls
that were not recorded. The listener has a thread of its own, so that a long call does not delay the role's renewal.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from synchronizer import (
    ANY,
    ClosedError,
    InvalidArgumentError,
    ReaderGroupError,
    Revision,
    State,
    StateSynchronizer,
    Transition,
    TransitionFeed,
    UnknownUpdateError,
)
from synchronizer.clock import growing_pause
from synchronizer.compare_and_set import remove_attributes
from synchronizer.liveness.exclusive_role import ExclusiveRole
from synchronizer.liveness.keeper import Keeper
from synchronizer.liveness.timing import RENEWALS, observe_interval

from .mailbox import N
from .system import CLOSE_TIMEOUT_SECONDS, Listener, Subscription

S = TypeVar("S", bound=State)

PREFIX: Final = "listener/"
NAME_PATTERN: Final = r"[A-Za-z0-9._-]{1,100}"
#: How long a dead process keeps the role, by default.
DEFAULT_ROLE_TIMEOUT_SECONDS: Final = 10.0
#: The first and the longest pause before a listener that raised is called again.
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 30.0
#: As `HeardUpTo.told`: all notifications of the revision.
ALL: Final = -1

_logger = logging.getLogger(__name__)


class HeardUpTo(NamedTuple):
    """The position of a durable name, as its role stores it."""

    offset: int
    update_index: int
    #: The number of the revision's notifications that were processed, or `ALL`.
    told: int
    #: These notifications report the revision as the present value, which a new name hears first.
    is_present_value: bool = False
    #: Changes before the revision were missed, and no notification has reported it yet.
    missed: bool = False

    @property
    def revision(self) -> Revision:
        return Revision(self.offset, self.update_index)


def attribute_of(kind: type, name: str) -> str:
    """Return the name of the attribute that holds the role, on the segment of the state's log."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise InvalidArgumentError(
            "the name of a durable listener must have 1 to 100 letters, digits and . _ -", name=name
        )
    return f"{PREFIX}{kind.__name__}/{name}"


def forget(synchronizer: StateSynchronizer[S], attribute: str) -> None:
    """Remove the position of a durable name. Removing it twice is no error."""
    remove_attributes(synchronizer.store, synchronizer.segment, {attribute: ANY})


@dataclass
class _ListenerCall(Generic[N]):
    after: HeardUpTo  # the position after the call
    done: bool = False
    error: BaseException | None = None
    counts: bool = True  # the role was not lost during the call


class _Caller(Subscription[N]):
    """Calls the listener and reports the outcome of each call to ``on_end``."""

    def __init__(
        self, listener: Listener[N], *, name: str, thread: bool, on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._on_end = on_end
        super().__init__(listener, name=name, queue_size=1, thread=thread, on_failure=lambda: None)

    def _returned(self) -> None:
        self._on_end(None)

    def _failed(self, error: BaseException) -> None:
        self._on_end(error)


class DurableListening(Generic[S, N]):
    """One listener under a durable name, until `stop`.

    ``notifications_of`` returns the notifications of a transition; its second argument is whether changes before it
    were missed. Without ``thread``, `look` does all the work.
    """

    def __init__(
        self,
        listener: Listener[N],
        synchronizer: StateSynchronizer[S],
        notifications_of: Callable[[Transition[S], bool], Sequence[N]],
        *,
        attribute: str,
        timeout_seconds: float,
        thread: bool,
        on_failure: Callable[[], None],
    ) -> None:
        self.listener = listener
        self._synchronizer = synchronizer
        self._notifications_of = notifications_of
        self._timeout_seconds = timeout_seconds
        self._on_failure = on_failure
        self._clock = synchronizer.clock
        self._role = ExclusiveRole(synchronizer.store, synchronizer.segment, attribute, self._clock)
        self._name = f"{attribute.removeprefix(PREFIX)} of {synchronizer.name}"
        self._caller = _Caller(listener, name=self._name, thread=thread, on_end=self._end_call)
        self._stopping = False
        self._stop_at = float("inf")  # the role then expires if the listener has not returned
        self._stepping = threading.Lock()  # guards the attributes below
        self._ended = False
        self._call: _ListenerCall[N] | None = None
        self._failures = 0  # of calls, in a row
        self._call_at = float("-inf")
        #: A new name hears the changes since its registration, also if it gets the role later.
        self._since_begin: TransitionFeed[S] | None = synchronizer.transitions()
        # While the role is held:
        self._times_taken = 0
        self._feed: TransitionFeed[S] | None = None
        self._heard: HeardUpTo | None = None
        self._is_recorded = True
        self._record_at = float("-inf")
        self._pending: list[Transition[S]] = []  # all after the position, with the one in a call
        self._to_tell: Sequence[N] | None = None  # the notifications of the first of them
        self._threaded = thread
        self._keeper = Keeper(
            self._step_until_stopped,
            name=f"role of {self._name}",
            clock=self._clock,
            logger=_logger,
            on_end=self._end_caller,
            max_pause_seconds=self._interval_seconds,
        )

    def start(self) -> None:
        """Begin to listen. An unavailable store is logged and retried."""
        if not self._threaded:
            self._keeper.attempt(self._step)
            return
        try:
            self._keeper.start()
        except BaseException:
            self._threaded, self._ended = False, True
            self._caller.close()
            raise

    def look(self) -> None:
        """Tell the listener of new changes: soon, or, without a thread, now; then errors are raised."""
        if self._threaded:
            self._keeper.wake()
        else:
            self._step()

    def stop(self) -> None:
        """Begin no further call, and release the role after the current one. Stopping twice is no error."""
        self._stopping = True
        self._stop_at = min(self._stop_at, self._clock.monotonic() + CLOSE_TIMEOUT_SECONDS)
        self._keeper.wake()
        if not self._threaded:
            self._keeper.attempt(self._step)

    def join(self, timeout: float) -> None:
        """After `stop`: wait up to ``timeout`` seconds each for the current call and the role's thread.

        Return at once inside that call, and on the listener's event loop, where a wait would block it.
        """
        if self._is_calling and self._caller.is_this_loop:
            return
        self._caller.join(timeout)
        if not self._caller.is_this_thread:
            self._keeper.wake()
            self._keeper.join(timeout)

    @property
    def ended(self) -> bool:
        return self._ended and self._caller.ended

    # ------------------------------------------------------------------ the thread

    def _step_until_stopped(self) -> float | None:
        is_over = self._clock.monotonic() >= self._stop_at or self._caller.abandoned
        due = None if is_over else self._step()
        return None if self._ended else due

    def _end_caller(self, closed: ClosedError | None) -> None:
        if closed is not None:
            _logger.info("%s receives no more notifications: %s", self._name, closed)
        self._caller.close()
        if self._is_calling:
            self._caller.abandon()

    @property
    def _interval_seconds(self) -> float:
        return observe_interval(self._timeout_seconds)

    def _step(self) -> float:
        """Do one round; return when the next is due."""
        due = self._clock.monotonic() + self._interval_seconds
        if self._stepping.acquire(blocking=False):  # a listener may call this again, through a poll of its own
            try:
                self._step_locked()
            finally:
                self._stepping.release()
        return min(due, self._call_at) if self._call_at > self._clock.monotonic() else due

    def _step_locked(self) -> None:
        if self._ended:
            return
        needs_role = not self._stopping or (self._is_calling and self._heard is not None)
        if needs_role:
            if not self._role.take(self._timeout_seconds):
                self._lose()
                return
            if self._heard is not None and self._times_taken != self._role.times_taken:
                self._lose()  # another process may have held it in between
            self._times_taken = self._role.times_taken
        while not self._is_calling:
            if self._call is not None:
                self._take_up_call(self._call)
            if self._stopping:
                self._end()
                return
            if not self._begin_call():
                return

    @property
    def _is_calling(self) -> bool:
        return self._call is not None and not self._call.done

    def _end(self) -> None:
        self._ended = True
        self._caller.close()
        try:
            if self._heard is not None:
                self._record(at_once=True)
            self._role.give_up()
        except ReaderGroupError as error:
            _logger.warning("the role of %s could not be released and will expire: %s", self._name, error)
        finally:
            self._lose()

    def _lose(self) -> None:
        """Drop everything that is valid only with the role."""
        for feed in (self._feed, self._since_begin):
            if feed is not None:
                feed.close()
        if self._call is not None:
            self._call.counts = False
        self._feed = self._since_begin = self._heard = self._to_tell = None
        self._pending = []
        self._is_recorded = True
        self._record_at = float("-inf")

    # ------------------------------------------------------------------ calls

    def _begin_call(self) -> bool:
        """Begin the next call; return False if there is nothing to tell, or if a pause is under way."""
        if self._clock.monotonic() < self._call_at:
            return False
        following = self._following()
        if not self._record() or following is None or self._clock.monotonic() >= self._role.valid_until:
            return False
        notification, after = following
        self._call = _ListenerCall(after)
        try:
            self._caller.put(notification)
            self._caller.deliver()
        except BaseException:
            self._call = None
            raise
        return True

    def _end_call(self, error: BaseException | None) -> None:
        """Note the outcome of a call. Runs in the thread or on the event loop of the listener."""
        assert self._call is not None
        self._call.error = error
        self._call.done = True
        self._keeper.wake()

    def _take_up_call(self, call: _ListenerCall[N]) -> None:
        self._call = None
        if call.error is not None:
            self._pause("a durable listener raised", call.error)
        else:
            self._failures = 0
            if call.counts:
                self._heard, self._is_recorded = call.after, False

    def _pause(self, what: str, error: BaseException) -> None:
        self._on_failure()
        self._failures += 1
        pause = growing_pause(self._failures, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        self._call_at = self._clock.monotonic() + pause
        _logger.error(
            "%s; the next attempt is in %.3g s: %s, %r", what, pause, self._name, self.listener, exc_info=error
        )

    # ------------------------------------------------------------------ the position

    def _record(self, *, at_once: bool = False) -> bool:
        """Store the position, but only at intervals if no call moved it; return False if the role is lost."""
        if self._heard is None or self._role.value.payload == self._heard:
            self._is_recorded = True
            return True
        now = self._clock.monotonic()
        if self._is_recorded and now < self._record_at and not at_once:
            return True
        if not self._role.record(*self._heard):
            self._lose()
            return False
        self._is_recorded = True
        self._record_at = now + self._timeout_seconds / RENEWALS
        return True

    def _following(self) -> tuple[N, HeardUpTo] | None:
        """Return the next notification and the position after it, or None."""
        if self._feed is None:
            self._begin()
        else:
            self._take_up_changes(self._feed)
        while self._pending and self._heard is not None:
            transition, heard = self._pending[0], self._heard
            revision = transition.revision
            if self._to_tell is None:
                try:
                    self._to_tell = self._notifications_of(transition, heard.missed)
                except Exception as error:
                    self._pause("the notifications of a change could not be computed", error)
                    return None
            told = heard.told if heard.revision == revision else 0
            if 0 <= told < len(self._to_tell):
                is_last = told + 1 == len(self._to_tell)
                after = HeardUpTo(revision.offset, revision.index, ALL if is_last else told + 1)
                if not is_last:
                    is_present_value = heard.is_present_value and heard.revision == revision
                    after = after._replace(is_present_value=is_present_value, missed=heard.missed)
                return self._to_tell[told], after
            if told != ALL:
                missed = (heard.missed or transition.gap) and not self._to_tell
                self._heard = HeardUpTo(revision.offset, revision.index, ALL, missed=missed)
            del self._pending[0]
            self._to_tell = None
        return None

    def _begin(self) -> None:
        """Find the changes that the name has not processed."""
        feed, self._since_begin = self._since_begin or self._synchronizer.transitions(), None
        heard = self._heard or self._remembered()
        if heard is not None:
            heard, pending = self._unheard(heard)
        else:
            pending = list(feed.drain())
            if not pending:
                return  # there is no state
            revision = pending[0].revision
            heard = HeardUpTo(revision.offset, revision.index, 0, is_present_value=True)
        self._feed, self._heard, self._pending, self._to_tell = feed, heard, pending, None

    def _remembered(self) -> HeardUpTo | None:
        payload = self._role.value.payload
        try:
            return HeardUpTo(*payload) if payload else None
        except TypeError as error:
            self._role.give_up()  # for a process with the newer release
            raise UnknownUpdateError(
                "a newer release wrote the position of this durable name; deploy that release here", name=self._name
            ) from error

    def _unheard(self, heard: HeardUpTo) -> tuple[HeardUpTo, list[Transition[S]]]:
        """Return the transitions in the log after the position, with one that was told in part."""
        after = heard.revision if heard.told == ALL else Revision(heard.offset, heard.update_index - 1)
        found = list(self._synchronizer.history(after))
        if found and heard.told != ALL and found[0].revision == heard.revision:
            if heard.is_present_value:  # the state before does not matter
                found[0] = Transition(None, found[0].after, found[0].revision)
            elif found[0].gap:  # the present value replaces the rest of what was told in part
                heard = heard._replace(told=0)
        return heard, found

    def _take_up_changes(self, feed: TransitionFeed[S]) -> None:
        """Queue the transitions applied since the last call."""
        assert self._heard is not None
        reached = self._pending[-1].revision if self._pending else self._heard.revision
        new = [each for each in feed.drain() if each.revision > reached]
        if any(each.before is None or each.gap for each in new):
            feed.close()
            self._feed = None
            self._begin()
        else:
            self._pending += new
