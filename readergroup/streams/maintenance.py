"""Applies the policies of a store's streams, in whichever process is at work.

Each kind of policy has a segment in the store, its registry, with two attributes for each stream that has such a
policy: when the stream is due, and a history that only the policy reads. A process that writes or reads any stream
looks there about once a minute. It claims a stream that is due by moving the time forward, by compare-and-set, so that
one process at a time applies a policy. If it dies, the stream is due again a minute later.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from synchronizer import (
    ANY,
    Appended,
    AttributeChange,
    Clock,
    ClosedError,
    Deadline,
    NotFoundError,
    ReaderGroupError,
    StoreUnavailableError,
)
from synchronizer.compare_and_set import remove_attributes
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread

from .metadata import StreamMetadata
from .pending import PendingChanges
from .state import StreamState

#: How often a process looks for streams that are due, and the longest time between two applications of a policy.
INTERVAL_SECONDS: Final = 60.0
#: When a process looks for the first time that only has a client open.
FIRST_LOOK_SECONDS: Final = 5.0
_DUE: Final = "due/"
_HISTORY: Final = "history/"

_logger = get_logger(__name__)


class _Claim(NamedTuple):
    stream: str
    value: bytes | None  # of the attribute now


class DuePolicies(ABC):
    """One kind of policy, of all streams of a store, as one client applies it. Threads may share it.

    Args:
        metadata: The metadata of the streams.
        pending: Their pending changes.
        registry: The name of the registry in the store.
        shortest_interval_seconds: The least time between two looks at the registry.
    """

    def __init__(
        self,
        metadata: StreamMetadata,
        pending: PendingChanges,
        registry: str,
        *,
        shortest_interval_seconds: float = 1.0,
    ) -> None:
        self._metadata = metadata
        self._pending = pending
        self._registry = registry
        self._shortest_interval_seconds = shortest_interval_seconds
        self._store = metadata.store
        self._clock = metadata.clock
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._urgent: set[str] = set()
        self._followed: set[str] = set()  # streams with a policy that are written or read here
        #: When, on the clock, `step` has something to do.
        self.due = self._clock.monotonic() + INTERVAL_SECONDS

    # ------------------------------------------------------------------ what a kind of policy says

    @abstractmethod
    def has_policy(self, state: StreamState) -> bool:
        """Return whether the policy is to be applied to the stream, now or later."""

    @abstractmethod
    def apply(self, state: StreamState, deadline: Deadline) -> float:
        """Apply the policy of a stream, which has one; return in how many seconds it is due again."""

    # ------------------------------------------------------------------ which streams have a policy

    def register(self, stream: str, deadline: Deadline) -> None:
        """Let all processes apply the policy that the stream is about to get."""
        backoff = self._metadata.backoff(deadline)
        backoff.retry(lambda: self._store.create(self._registry))
        change = {f"{_DUE}{stream}": AttributeChange(ANY, self._value(0.0))}
        backoff.retry(lambda: self._store.append(self._registry, b"", attributes=change))

    def _unregister(self, claim: _Claim) -> None:
        """Forget a stream that is deleted or has no policy, unless it has just got one."""
        known = {f"{_DUE}{claim.stream}": claim.value} if claim.value is not None else {}
        remove_attributes(self._store, self._registry, {**known, f"{_HISTORY}{claim.stream}": ANY})

    @staticmethod
    def _value(due: float) -> bytes:
        # Never the same twice: a change that compares with it must not succeed after another one.
        return f"{due:.3f} {secrets.token_hex(8)}".encode()

    def streams(self) -> list[str]:
        """Return the names of the streams that may have a policy."""
        return [each.removeprefix(_DUE) for each in self._due()]

    def _due(self) -> Mapping[str, bytes]:
        try:
            return self._store.attributes(self._registry, _DUE)
        except NotFoundError:  # no stream ever had a policy
            return {}

    # ------------------------------------------------------------------ the history of a stream

    def _stored_history(self, stream: str, deadline: Deadline) -> bytes | None:
        attribute = f"{_HISTORY}{stream}"
        read = partial(self._store.attributes, self._registry, names=[attribute])
        try:
            stored: bytes | None = self._metadata.backoff(deadline).retry(read).get(attribute)
        except NotFoundError:  # a policy was set by a process that died before it could register it
            return None
        return stored

    def _replace_history(self, stream: str, stored: bytes | None, history: bytes) -> bool:
        """Store the history; return False if another process may have changed it meanwhile."""
        change = {f"{_HISTORY}{stream}": AttributeChange(stored, history)}
        return isinstance(self._store.append(self._registry, b"", attributes=change), Appended)

    # ------------------------------------------------------------------ what writers and readers do

    def follow(self, state: StreamState) -> None:
        """Apply the policy of a stream that is written or read here soon."""
        with self._lock:
            if self.has_policy(state) and state.name not in self._followed:
                self._followed.add(state.name)
                self.due = float("-inf")

    def _urge(self, stream: str) -> None:
        """Apply the policy of a stream at once. Lock held."""
        self._urgent.add(stream)
        self.due = float("-inf")

    @property
    def is_due(self) -> bool:
        return self.due <= self._clock.monotonic()

    def step(self) -> float:
        """Apply the policies that are due; return when, on the clock, more are. Raises nothing but `ClosedError`."""
        if not self.is_due or not self._working.acquire(blocking=False):
            return max(self.due, self._clock.monotonic() + self._shortest_interval_seconds)
        try:
            while self.is_due:  # a writer may have made it due meanwhile
                self._round()
        finally:
            self._working.release()
        return self.due

    def _round(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            self.due = now + INTERVAL_SECONDS
            urgent, self._urgent = self._urgent, set()
        try:
            soonest = self._apply_due(urgent)
        except ClosedError:
            raise
        except ReaderGroupError as error:
            _logger.info("the policies in %s are applied a minute later: %s", self._registry, error)
            return
        with self._lock:
            self.due = min(self.due, now + max(soonest, self._shortest_interval_seconds))

    def _apply_due(self, urgent: Iterable[str]) -> float:
        """Apply the policies that are due, and return in how many seconds the next is."""
        found = self._due()
        if missing := [each for each in self._followed if f"{_DUE}{each}" not in found]:
            # The process that set the policy has died, or has raced with one that found the stream without it.
            for stream in missing:
                self.register(stream, self._metadata.deadline())
            self._followed.difference_update(missing)
            found = self._due()
        now, soonest = self._clock.time(), INTERVAL_SECONDS
        for attribute, value in found.items():
            stream, due = attribute.removeprefix(_DUE), float(value.split()[0])
            if stream not in urgent and now < due <= now + 2 * INTERVAL_SECONDS:  # later: by a clock that is ahead
                soonest = min(soonest, due - now)
                continue
            try:
                # What is urgent needs no claim: to do it twice at once does nothing twice.
                claim = _Claim(stream, value) if stream in urgent else self._claim(_Claim(stream, value))
                if claim is not None:
                    with self._metadata.used(stream):
                        soonest = min(soonest, self._apply_claimed(claim))
            except ClosedError:
                raise
            except ReaderGroupError as error:
                _logger.warning("a policy of %s (%s) is applied a minute later: %s", stream, self._registry, error)
        return soonest

    def _claim(self, seen: _Claim, seconds: float = INTERVAL_SECONDS) -> _Claim | None:
        """Make the stream due later; return None if another process was faster."""
        value = self._value(self._clock.time() + seconds)
        change = {f"{_DUE}{seen.stream}": AttributeChange(seen.value, value)}
        answer = self._store.append(self._registry, b"", attributes=change)
        return _Claim(seen.stream, value) if isinstance(answer, Appended) else None

    def _apply_claimed(self, claim: _Claim) -> float:
        deadline = self._metadata.deadline()
        try:
            state = self._pending.fetch_state(claim.stream, deadline)
        except NotFoundError:
            self._unregister(claim)
            return INTERVAL_SECONDS
        if not self.has_policy(state):
            self._unregister(claim)
            return INTERVAL_SECONDS
        seconds = self.apply(state, deadline)
        if seconds < INTERVAL_SECONDS:
            self._claim(claim, seconds)
        return seconds


class Maintenance:
    """All kinds of policies, as one client applies them. Threads may share it."""

    def __init__(self, kinds: Sequence[DuePolicies]) -> None:
        self._kinds = kinds

    def follow(self, state: StreamState) -> None:
        """Apply the policies of a stream that is written or read here soon."""
        for kind in self._kinds:
            kind.follow(state)

    def look_now(self) -> None:
        """Make each kind look at its registry in the next `step`."""
        for kind in self._kinds:
            kind.due = float("-inf")

    @property
    def is_due(self) -> bool:
        return any(kind.is_due for kind in self._kinds)

    def step(self) -> float:
        """Apply the policies that are due; return when, on the clock, more are. Raises nothing but `ClosedError`."""
        return min(kind.step() for kind in self._kinds)


def maintain_in_background(maintenance: Maintenance, clock: Clock, closing: threading.Event, name: str) -> None:
    """Apply the policies that are due, in a thread, until ``closing`` is set or nobody holds the ``maintenance``.

    It begins `FIRST_LOOK_SECONDS` from now, so that a short command does not pay for it. If the system has no thread,
    other processes do the work.
    """
    held = weakref.ref(maintenance, lambda _: closing.set())  # the thread need not wait for its next look

    def loop() -> None:
        if clock.wait(closing, FIRST_LOOK_SECONDS):
            return
        if (first := held()) is not None:
            first.look_now()
            del first
        while (found := held()) is not None:
            due = found.step()
            del found
            if clock.wait(closing, max(1.0, due - clock.monotonic())):
                return

    with suppress(StoreUnavailableError):
        BackgroundThread(loop, name=name, clock=clock, stopping=closing).start()
