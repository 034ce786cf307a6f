"""`DurableListening`: a listener that continues where its name stopped, after a restart and in any process.

Of all processes that listen under a name, only the holder of an `ExclusiveRole` calls its listener. The role's payload
is the position: the last notification that was processed. It is stored after each call that returns, before the next
one begins. The next holder reads the state's log from there, so a crash loses nothing and repeats at most the calls
that were not recorded. The listener has a thread of its own, so that a long call does not delay the role's renewal.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from synchronizer import (
    ANY,
    ClosedError,
    InvalidArgumentError,
    ReaderGroupError,
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
from synchronizer.loggers import get_logger

from .mailbox import N
from .system import CLOSE_TIMEOUT_SECONDS, Listener, Subscription
from .unheard import HeardUpTo, NotComputedError, Unheard

S = TypeVar("S", bound=State)

PREFIX: Final = "listener/"
NAME_PATTERN: Final = r"[A-Za-z0-9._-]{1,100}"
#: How long a dead process keeps the role, by default.
DEFAULT_ROLE_TIMEOUT_SECONDS: Final = 10.0
#: The first and the longest pause before a listener that raised is called again.
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 30.0
_logger = get_logger(__name__)


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
        self._unheard: Unheard[S, N] | None = None
        self._is_recorded = True
        self._record_at = float("-inf")
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
            self._caller.start()
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
    def _heard(self) -> HeardUpTo | None:
        """The position, if the role is held."""
        return None if self._unheard is None else self._unheard.heard

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
        for each in (self._unheard, self._since_begin):
            if each is not None:
                each.close()
        if self._call is not None:
            self._call.counts = False
        self._unheard = self._since_begin = None
        self._is_recorded = True
        self._record_at = float("-inf")

    # ------------------------------------------------------------------ calls

    def _begin_call(self) -> bool:
        """Begin the next call; return False if there is nothing to tell, or if a pause is under way."""
        if self._clock.monotonic() < self._call_at:
            return False
        following = self._next()
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
            if call.counts and self._unheard is not None:
                self._unheard.heard, self._is_recorded = call.after, False

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
        heard = self._heard
        if heard is None or self._role.value.payload == heard:
            self._is_recorded = True
            return True
        now = self._clock.monotonic()
        if self._is_recorded and now < self._record_at and not at_once:
            return True
        if not self._role.record(*heard):
            self._lose()
            return False
        self._is_recorded = True
        self._record_at = now + self._timeout_seconds / RENEWALS
        return True

    def _next(self) -> tuple[N, HeardUpTo] | None:
        """Return the next notification and the position after it, or None."""
        if self._unheard is None:
            remembered = self._remembered()
            self._unheard = Unheard(self._synchronizer, self._notifications_of, remembered, self._since_begin)
            self._since_begin = None
        try:
            return self._unheard.next()
        except NotComputedError as error:
            assert error.__cause__ is not None
            self._pause("the notifications of a change could not be computed", error.__cause__)
            return None

    def _remembered(self) -> HeardUpTo | None:
        payload = self._role.value.payload
        try:
            return HeardUpTo(*payload) if payload else None
        except TypeError as error:
            self._role.give_up()  # for a process with the newer release
            raise UnknownUpdateError(
                "a newer release wrote the position of this durable name; deploy that release here", name=self._name
            ) from error
