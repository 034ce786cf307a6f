"""Applies the retention policies of a store's streams, in whichever process is at work.

The segment `REGISTRY` has two attributes for each stream with a policy: when it is due, and its `History`. A process
that writes or reads any stream looks there once a minute. It claims a stream that is due by moving the time forward, by
compare-and-set, so that one process at a time applies a policy. If it dies, the stream is due again a minute later.

A writer also counts its bytes, and makes its stream due after a sixteenth of ``max_bytes``.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple, Protocol

from synchronizer import (
    ANY,
    Appended,
    AttributeChange,
    ClosedError,
    Deadline,
    InvalidArgumentError,
    Map,
    NotFoundError,
    ReaderGroupError,
    TruncatedError,
)
from synchronizer.compare_and_set import remove_attributes

from ..config import FrozenModel, RetentionPolicy, StreamCut
from ..data.boundaries import next_boundary
from ..data_segments import DataSegments
from ..metadata import StreamMetadata
from ..pending import PendingChanges
from ..state import StreamState
from ..succession import with_successors
from ..time_search import offsets_at
from .decision import Decision, Gap, Offsets, Reason, decide, gap
from .history import PRECISION, History, Sample

REGISTRY: Final = "readergroup/retention"
#: How often a process looks for streams that are due, and how often a policy is applied.
INTERVAL_SECONDS: Final = 60.0
#: A policy with a short ``max_age`` is applied more often, down to this.
_SHORTEST_INTERVAL_SECONDS: Final = 1.0
#: A writer never makes its stream due after fewer bytes.
_LEAST_BYTES: Final = 256 * 1024
_DUE: Final = "due/"
_HISTORY: Final = "history/"

_logger = logging.getLogger(__name__)


class Consumed(NamedTuple):
    """A subscribed group has consumed what is before all of these cuts of a stream; nothing if there is none."""

    incarnation: str
    cuts: Sequence[StreamCut]


#: By stream, then by group.
Subscribers = Mapping[str, Mapping[str, Consumed]]


class RetentionReport(FrozenModel):
    """What a retention policy deletes now: the answer of ``streams.retain``."""

    stream: str
    policy: RetentionPolicy
    #: Where the remaining data starts.
    head: StreamCut
    deleted_bytes: int
    kept_bytes: int
    #: Why bytes are deleted; None if none are.
    reason: Reason | None = None
    #: Subscribed groups that have not consumed all that is deleted.
    skipped: tuple[str, ...] = ()
    #: How many bytes each subscribed group has yet to consume.
    unconsumed_bytes: Mapping[str, int] = {}


class GroupsOfStreams(Protocol):
    """The reader groups of the store."""

    def subscribers(self) -> Subscribers:
        """Return how far each subscribed group has consumed its streams."""

    def note_skipped(self, group: str, head: StreamCut) -> None:
        """Let the group know that events before ``head`` are deleted which it has not consumed."""


class _Claim(NamedTuple):
    stream: str
    value: bytes | None  # of the attribute now


class _Budget:
    """How many bytes a writer may store before its stream is due."""

    def __init__(self, policy: RetentionPolicy) -> None:
        assert policy.max_bytes is not None
        self.limit = max(_LEAST_BYTES, int(policy.max_bytes * PRECISION))
        self.left = self.limit
        self.stored = 0  # since the policy was applied

    def renew(self, grown: int) -> None:
        """Begin anew. The stream has ``grown`` since: other writers stored the rest, and will do so again."""
        share = self.stored / grown if grown > self.stored > 0 else 1.0
        self.left, self.stored = int(self.limit * share), 0


class Retention:
    """The retention of the streams of one client. Threads may share it.

    Args:
        metadata: The metadata of the streams.
        data: Their segments.
        pending: Their pending changes.
        truncate: Moves the head of a stream to these offsets.
    """

    def __init__(
        self,
        metadata: StreamMetadata,
        data: DataSegments,
        pending: PendingChanges,
        *,
        truncate: Callable[[StreamState, Offsets, Deadline], StreamState],
    ) -> None:
        self._metadata = metadata
        self._data = data
        self._pending = pending
        self._truncate = truncate
        self._store = metadata.store
        self._clock = metadata.clock
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._budgets: dict[str, _Budget] = {}
        self._urgent: set[str] = set()
        self._followed: set[str] = set()  # streams with a policy that are written or read here
        #: Returns the groups of the store. Without a client there are none.
        self.groups: Callable[[], GroupsOfStreams] | None = None
        #: When, on the clock, `step` has something to do.
        self.due = self._clock.monotonic() + INTERVAL_SECONDS

    # ------------------------------------------------------------------ which streams have a policy

    def register(self, stream: str, deadline: Deadline) -> None:
        """Let all processes apply the policy that the stream is about to get."""
        backoff = self._metadata.backoff(deadline)
        backoff.retry(lambda: self._store.create(REGISTRY))
        change = {f"{_DUE}{stream}": AttributeChange(ANY, self._value(0.0))}
        backoff.retry(lambda: self._store.append(REGISTRY, b"", attributes=change))

    def _unregister(self, claim: _Claim) -> None:
        """Forget a stream that is deleted or has no policy, unless it has just got one."""
        known = {f"{_DUE}{claim.stream}": claim.value} if claim.value is not None else {}
        remove_attributes(self._store, REGISTRY, {**known, f"{_HISTORY}{claim.stream}": ANY})

    @staticmethod
    def _value(due: float) -> bytes:
        # Never the same twice: a change that compares with it must not succeed after another one.
        return f"{due:.3f} {secrets.token_hex(8)}".encode()

    # ------------------------------------------------------------------ what writers and readers do

    def follow(self, state: StreamState) -> None:
        """Apply the policy of a stream that is written or read here soon, and as it grows."""
        policy = state.config.retention
        with self._lock:
            if policy is None or policy.max_bytes is None:
                self._budgets.pop(state.name, None)
            elif state.name not in self._budgets:
                self._budgets[state.name] = _Budget(policy)
            if policy is not None and state.name not in self._followed:
                self._followed.add(state.name)
                self.due = float("-inf")

    def stored(self, stream: str, size: int) -> None:
        """Take note that a writer of this client has stored so many bytes."""
        budget = self._budgets.get(stream)
        if budget is None:
            return
        with self._lock:
            budget.stored += size
            budget.left -= size
            if budget.left <= 0:
                budget.left = budget.limit
                self._urgent.add(stream)
                self.due = float("-inf")

    @property
    def is_due(self) -> bool:
        return self.due <= self._clock.monotonic()

    def step(self) -> float:
        """Apply the policies that are due; return when, on the clock, more are. Raises nothing but `ClosedError`."""
        if not self.is_due or not self._working.acquire(blocking=False):
            return max(self.due, self._clock.monotonic() + _SHORTEST_INTERVAL_SECONDS)
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
            _logger.info("retention is applied a minute later: %s", error)
            return
        with self._lock:
            self.due = min(self.due, now + max(soonest, _SHORTEST_INTERVAL_SECONDS))

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
        subscribers: Subscribers | None = None  # read once, because this reads all groups
        for attribute, value in found.items():
            stream, due = attribute.removeprefix(_DUE), float(value.split()[0])
            if stream not in urgent and now < due <= now + 2 * INTERVAL_SECONDS:  # later: by a clock that is ahead
                soonest = min(soonest, due - now)
                continue
            try:
                # What is urgent needs no claim: to do it twice at once deletes nothing twice.
                claim = _Claim(stream, value) if stream in urgent else self._claim(_Claim(stream, value))
                if claim is not None:
                    if subscribers is None:
                        subscribers = self._subscribers()
                    with self._metadata.used(stream):
                        soonest = min(soonest, self._apply_claimed(claim, subscribers))
            except ClosedError:
                raise
            except TruncatedError:
                continue  # another process is deleting what this one has looked at
            except ReaderGroupError as error:
                _logger.warning("the retention policy of %s is applied a minute later: %s", stream, error)
        return soonest

    def _subscribers(self) -> Subscribers:
        """Return the subscribed groups. If one cannot be read there are none, so that nothing counts as consumed."""
        try:
            return {} if self.groups is None else self.groups().subscribers()
        except ClosedError:
            raise
        except ReaderGroupError as error:
            _logger.warning("retention applies only limits, because a reader group cannot be read: %s", error)
            return {}

    def _claim(self, seen: _Claim, seconds: float = INTERVAL_SECONDS) -> _Claim | None:
        """Make the stream due later; return None if another process was faster."""
        value = self._value(self._clock.time() + seconds)
        change = {f"{_DUE}{seen.stream}": AttributeChange(seen.value, value)}
        answer = self._store.append(REGISTRY, b"", attributes=change)
        return _Claim(seen.stream, value) if isinstance(answer, Appended) else None

    def _apply_claimed(self, claim: _Claim, subscribers: Subscribers) -> float:
        deadline = self._metadata.deadline()
        try:
            state = self._pending.fetch_state(claim.stream, deadline)
        except NotFoundError:
            self._unregister(claim)
            return INTERVAL_SECONDS
        policy = state.config.retention
        if policy is None:
            self._unregister(claim)
            return INTERVAL_SECONDS
        self._apply(state, policy, subscribers.get(claim.stream, {}), deadline)
        seconds = _interval(policy)
        if seconds < INTERVAL_SECONDS:
            self._claim(claim, seconds)
        return seconds

    # ------------------------------------------------------------------ one stream

    def report(self, stream: str, *, dry_run: bool, deadline: Deadline) -> RetentionReport:
        """Apply the policy of a stream now, or only report what that would do."""
        while True:
            state = self._pending.fetch_state(stream, deadline)
            policy = state.config.retention
            if policy is None:
                raise InvalidArgumentError(
                    "the stream has no retention policy; change it with streams.configure", stream=stream
                )
            subscribers = self._subscribers().get(stream, {})
            try:
                decision, consumed = self._apply(state, policy, subscribers, deadline, dry_run=dry_run)
                break
            except TruncatedError:  # another process is deleting what this one has looked at
                if deadline.passed:
                    raise
        head = state.head if decision is None else decision.head
        lengths = self._lengths(state, state.head, deadline)
        kept = _size(state, head, lengths)
        return RetentionReport(
            stream=stream,
            policy=policy,
            head=state.cut(head),
            deleted_bytes=_size(state, state.head, lengths) - kept,
            kept_bytes=kept,
            reason=None if decision is None else decision.reason,
            skipped=() if decision is None else decision.skipped,
            unconsumed_bytes={
                group: _size(state, state.later(state.head, cut), lengths) for group, cut in consumed.items()
            },
        )

    def streams(self) -> list[str]:
        """Return the names of the streams that may have a policy."""
        return [each.removeprefix(_DUE) for each in self._due()]

    def _due(self) -> Mapping[str, bytes]:
        try:
            return self._store.attributes(REGISTRY, _DUE)
        except NotFoundError:  # no stream ever had a policy
            return {}

    def _apply(
        self,
        state: StreamState,
        policy: RetentionPolicy,
        subscribers: Mapping[str, Consumed],
        deadline: Deadline,
        *,
        dry_run: bool = False,
    ) -> tuple[Decision | None, Mapping[str, Offsets]]:
        attribute = f"{_HISTORY}{state.name}"
        stored = self._store.attributes(REGISTRY, names=[attribute]).get(attribute)
        history, grown = self._updated(state, stored, deadline)
        now = self._clock.time()
        while (found := gap(policy, history, now)) is not None:
            if (filled := self._filled(state, history, found, deadline)) is None:
                break
            history = filled
        consumed = {
            group: _consumed(state, found.cuts)
            for group, found in subscribers.items()
            if found.incarnation == state.incarnation
        }
        decision = decide(policy, state, history, now, consumed)
        if dry_run:
            return decision, consumed
        if decision is not None:
            for group in decision.skipped:
                if self.groups is not None:
                    self.groups().note_skipped(group, state.cut(decision.head))
            state = self._truncate(state, decision.head, deadline)
        history = history.since(_first_needed(state, history)).thinned(now)
        # Lost to another process that applies the policy now, whose history is as good.
        self._store.append(REGISTRY, b"", attributes={attribute: AttributeChange(stored, history.encode())})
        with self._lock:
            if (budget := self._budgets.get(state.name)) is not None:
                budget.renew(grown)
        return decision, consumed

    def _updated(self, state: StreamState, stored: bytes | None, deadline: Deadline) -> tuple[History, int]:
        """Return the history with a sample of now, and how many bytes came since the last one."""
        history = None if stored is None else History.decode(stored)
        for each in (history, History(state.incarnation, (Sample(float("-inf"), 0, state.head),))):
            if each is None or each.incarnation != state.incarnation or not _is_known(state, each.newest):
                continue
            try:
                lengths = self._lengths(state, each.newest.offsets, deadline)
            except NotFoundError:  # truncated by hand long ago
                continue
            grown = _size(state, each.newest.offsets, lengths)
            end = {number: lengths[number] for number in state.current}
            sample = Sample(self._clock.time(), each.newest.written + grown, Map(end))
            return each.with_sample(sample), grown
        raise NotFoundError("the stream was deleted meanwhile", stream=state.name)

    def _lengths(self, state: StreamState, start: Offsets, deadline: Deadline) -> Mapping[int, int]:
        return self._data.lengths(state, state.reachable(start), deadline)

    def _filled(self, state: StreamState, history: History, found: Gap, deadline: Deadline) -> History | None:
        """Return the history with a sample at the limit in the gap, as the data itself shows it; None if it cannot."""
        before, after = found.before, found.after
        if not _is_known(state, before):
            return None
        start = state.later(state.head, before.offsets)
        lengths = self._lengths(state, before.offsets, deadline)
        end = before.written + _size(state, before.offsets, lengths)
        if found.at is not None:
            backoff = self._metadata.backoff(deadline)
            cut, at = offsets_at(self._store, state, int(found.at * 1_000_000), backoff), found.at
        else:
            size = found.written - (end - _size(state, start, lengths))
            cut, at = self._advanced(state, start, max(0, size), deadline), after.at
        cut = state.earlier(state.later(cut, start), after.offsets)
        written = end - _size(state, cut, lengths)
        if found.at is None and not before.written < written < after.written:
            return None
        return history.inserted(Sample(at, written, cut), after)

    def _advanced(self, state: StreamState, start: Offsets, size: int, deadline: Deadline) -> Offsets:
        """Return a cut that is about ``size`` bytes behind ``start``: earlier epochs first, segments in proportion."""
        cut = dict(start)
        while True:
            lengths = self._data.lengths(state, cut, deadline)
            old = {number for number in cut if state.segments[number].successors} or set(cut)
            available = sum(lengths[number] - cut[number] for number in old)
            if size < available or not state.segments[min(old)].successors:
                break
            size -= available
            cut = with_successors(state, {**cut, **{number: lengths[number] for number in old}}, old)
        for number in old:
            length, offset = lengths[number], cut[number]
            cut[number] = next_boundary(
                self._store,
                state.data_segment(number),
                offset + (length - offset) * size // max(1, available),
                known=offset,
                end=length,
            )
        return cut


def _interval(policy: RetentionPolicy) -> float:
    """Return how often the policy is applied, in seconds."""
    ages = [age.total_seconds() for age in (policy.max_age, policy.min_age) if age is not None]
    return max(_SHORTEST_INTERVAL_SECONDS, min([INTERVAL_SECONDS, *(PRECISION * age for age in ages)]))


def _size(state: StreamState, start: Offsets, lengths: Mapping[int, int]) -> int:
    """Return how many bytes there are from the cut on."""
    return sum(lengths[number] - start.get(number, 0) for number in state.reachable(start))


def _consumed(state: StreamState, cuts: Sequence[StreamCut]) -> Offsets:
    """Return up to where a group has consumed the stream. Behind all that the state knows, it has consumed nothing."""
    try:
        return reduce(state.earlier, map(state.check_cut, cuts)) if cuts else state.head
    except (InvalidArgumentError, NotFoundError):
        return state.head


def _first_needed(state: StreamState, history: History) -> int:
    """Return the index of the last sample that is not behind the head."""
    first = 0
    for index, sample in enumerate(history.samples):
        if _is_known(state, sample) and not state.precedes(state.cut(sample.offsets), state.head_cut):
            break
        first = index
    return first


def _is_known(state: StreamState, sample: Sample) -> bool:
    """Return whether the state has not forgotten the segments of the sample, long after they were truncated."""
    return sample.offsets.keys() <= state.segments.keys()
