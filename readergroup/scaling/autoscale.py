"""`Autoscaling`: calls a callback whenever the desired number of readers of a group changes.

Of all processes that registered a callback, one at a time is called: the holder of an `ExclusiveRole` with the timeout
of the group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from synchronizer import ClosedError, NotFoundError, ReaderGroupError
from synchronizer.callables import checked
from synchronizer.clock import growing_pause
from synchronizer.liveness.exclusive_role import ExclusiveRole, RoleValue
from synchronizer.liveness.keeper import Keeper
from synchronizer.liveness.timing import observe_interval
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread

from ..group.updater import is_of_another_stream
from ..telemetry.logs import LogAbout
from .policy import ReaderScalingPolicy, ScalingDecision, ScalingHistory
from .scaled_group import ScaledGroup
from .scaler import LOOK_SECONDS, Scaler

ROLE: Final = "autoscale"
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 30.0
#: How long closing waits for a running call.
CLOSE_SECONDS: Final = 5.0

_logger = get_logger(__name__)

Callback = Callable[[ScalingDecision], object]


class Told(NamedTuple):
    """What the store remembers for the next holder of the role."""

    #: The number that the last successful call got, and the number of segments when it last held.
    number: int | None = None
    number_of_segments: int | None = None

    @property
    def history(self) -> ScalingHistory | None:
        """The history that the next holder's decisions start from."""
        if self.number is None:
            return None
        return ScalingHistory(self.number, self.number_of_segments, changed_at=float("-inf"), calm_since=None)


def forget_history(stored: bytes) -> bytes:
    """Return the value of the role after its group is deleted: without memory, but with the same holder.

    The next group of this name has the role too.
    """
    value = RoleValue.decode(stored)
    return RoleValue(value.holder_id, value.counter + 1).encode()


class Autoscaling:
    """A callback that is registered until `close`. Calling this object calls the callback.

    `ReaderGroup.autoscale` creates it.
    """

    def __init__(self, group: ScaledGroup, policy: ReaderScalingPolicy, callback: Callback) -> None:
        self._group = group
        self._logger = LogAbout(_logger, group=group.name)
        self._policy = policy
        self._callback = checked(callback, "callback", "decision")
        synchronizer = group.synchronizer
        self._clock = synchronizer.clock
        self._role = ExclusiveRole(synchronizer.store, synchronizer.segment, ROLE, self._clock)
        self._scaler: Scaler | None = None  # while the role is held
        self._look_at = float("-inf")
        self._call: _CallbackCall | None = None
        self._failures = 0  # consecutive ones
        self._call_at = float("-inf")
        self._closed = False
        self._is_deleted = False
        self._process_id = os.getpid()
        self._keeper = Keeper(
            self._step_until_closed,
            name=f"autoscaling of {group.name}",
            clock=self._clock,
            logger=self._logger,
            on_end=self._release,
            max_pause_seconds=self._interval_seconds,
        )
        self._unregister = group.segment_notifier.register_listener(lambda _: self._on_segments())
        try:
            self._keeper.start()
        except BaseException:
            self.close()  # the thread may have started
            raise

    def __call__(self, decision: ScalingDecision) -> object:
        return self._callback(decision)

    def stop(self) -> None:
        """Stop calling, and release the role soon."""
        self._closed = True
        self._keeper.wake()

    def close(self) -> None:
        """Stop calling, and release the role. Waits a few seconds for a running call. Can be called twice."""
        if os.getpid() != self._process_id:
            return  # a forked child: the callback belongs to the parent
        self.stop()
        self._unregister()
        call = self._call
        if call is None or call.thread is not threading.current_thread():
            self._keeper.join(2 * CLOSE_SECONDS)

    # ------------------------------------------------------------------ the thread

    def _on_segments(self) -> None:
        self._look_at = float("-inf")
        self._keeper.wake()

    def _step_until_closed(self) -> float | None:
        try:
            return None if self._closed else self._step()
        except NotFoundError as error:
            if is_of_another_stream(error):  # the group may still leave it
                raise
            self._is_deleted = True
            self._logger.info("autoscaling of %s ends: %s", self._group.name, error)
            return None

    def _release(self, closed: ClosedError | None) -> None:
        if closed is not None:
            self._logger.info("autoscaling of %s ends: %s", self._group.name, closed)
        try:
            if self._call is not None:
                self._call.thread.join(CLOSE_SECONDS)
                self._take_up_call()
            if self._is_deleted:
                self._role.record()  # a call for the deleted group may be recorded; the next group had none
            self._role.give_up()
        except ClosedError:
            pass  # the role expires
        except ReaderGroupError as error:
            self._logger.warning("the role of %s could not be released and will expire: %s", self._group.name, error)

    def _step(self) -> float:
        """Do one round; return when the next is due."""
        due = self._clock.monotonic() + self._interval_seconds
        if not self._role.take(self._timeout_seconds):
            self._scaler = None
            return due
        if self._call is not None and not self._take_up_call():
            return due
        found = self._look()
        if found is None:
            return min(due, self._look_at)
        decision, number_of_segments = found
        if decision.desired_readers == self._told.number:
            if number_of_segments != self._told.number_of_segments:
                self._role.record(*self._told._replace(number_of_segments=number_of_segments))
            return min(due, self._look_at)
        return min(due, self._call_with(decision, number_of_segments))

    def _look(self) -> tuple[ScalingDecision, int | None] | None:
        """Return the decision and the number of segments that it is based on; None if none is due."""
        now = self._clock.monotonic()
        if self._scaler is None:
            self._scaler = Scaler(self._group, self._policy, history=self._told.history)
        elif now < self._look_at:
            return None
        self._look_at = now + LOOK_SECONDS
        return self._scaler.decide(), self._scaler.number_of_segments

    def _call_with(self, decision: ScalingDecision, number_of_segments: int | None) -> float:
        """Start a call in its own thread, so that this one can renew the role; return when to look again."""
        now = self._clock.monotonic()
        if now >= self._call_at and now < self._role.valid_until:
            self._call = _CallbackCall(
                self._callback, decision, number_of_segments, self._keeper.wake, self._role.times_taken
            )
            return float("inf")
        self._look_at = min(self._look_at, self._call_at)
        return self._look_at

    def _take_up_call(self) -> bool:
        """Process the result of the call; return False while it is running."""
        call = self._call
        if call is None or not call.done:
            return False
        self._call = None
        self._look_at = float("-inf")
        if call.error is None:
            self._failures = 0
            if call.times_taken == self._role.times_taken:  # otherwise the call may be one for a deleted group
                self._role.record(*Told(call.decision.desired_readers, call.number_of_segments))
            return True
        self._failures += 1
        pause = growing_pause(self._failures, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        self._call_at = self._clock.monotonic() + pause
        self._logger.error(
            "the autoscaling callback raised; it is called again in %.3g s: %r",
            pause,
            self._callback,
            exc_info=call.error,
            extra={"revision": str(call.decision.revision)},
        )
        return True

    @property
    def _told(self) -> Told:
        return Told(*self._role.value.payload)

    @property
    def _timeout_seconds(self) -> float:
        return self._group.config.reader_timeout_seconds

    @property
    def _interval_seconds(self) -> float:
        return observe_interval(self._timeout_seconds)


class _CallbackCall:
    """One call of the callback, in its own thread."""

    def __init__(
        self,
        callback: Callback,
        decision: ScalingDecision,
        number_of_segments: int | None,
        on_end: Callable[[], None],
        times_taken: int,
    ) -> None:
        self.decision = decision
        self.number_of_segments = number_of_segments
        self.times_taken = times_taken
        self.error: BaseException | None = None
        self.done = False
        self._callback = callback
        self._on_end = on_end
        self.thread = BackgroundThread(self._run, name="autoscaling callback")
        self.thread.start()

    def _run(self) -> None:
        try:
            self._callback(self.decision)
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self._on_end()
