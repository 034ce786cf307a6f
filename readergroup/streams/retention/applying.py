"""Applies the retention policies of a store's streams. `maintenance` says when, and in which process.

The history of a stream in the registry is a `History`. A writer also counts its bytes, and makes its stream due when it
may be larger than ``max_bytes`` by a sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Final, Protocol

from synchronizer import (
    ClosedError,
    Deadline,
    InvalidArgumentError,
    Map,
    NotFoundError,
    ReaderGroupError,
    TruncatedError,
)
from synchronizer.loggers import get_logger
from synchronizer.threads.loading import loading

from ..config import RetentionPolicy, StreamCut
from ..data.boundaries import next_boundary
from ..data_segments import DataSegments
from ..maintenance import INTERVAL_SECONDS, DuePolicies
from ..metadata import StreamMetadata
from ..pending import PendingChanges
from ..state import StreamState
from ..succession import with_successors
from ..time_search import offsets_at
from .consumed import Consumed, Subscribers
from .decision import Decision, Gap, Offsets, decide, gap
from .history import PRECISION, History, Sample

if TYPE_CHECKING:  # a report loads it
    from .report import RetentionReport

REGISTRY: Final = "readergroup/retention"
#: A policy with a short ``max_age`` is applied more often, down to this.
_SHORTEST_INTERVAL_SECONDS: Final = 1.0
#: A writer never makes its stream due after fewer bytes.
_LEAST_BYTES: Final = 256 * 1024
#: The most sixteenths of the limit that are written before a policy is applied. A small stream waits no longer either:
#: what groups have consumed is deleted then.
_MOST_LIMITS: Final = 3

_logger = get_logger(__name__)


class GroupsOfStreams(Protocol):
    """The reader groups of the store."""

    def subscribers(self, deadline: Deadline) -> Subscribers:
        """Return how far each subscribed group has consumed its streams."""

    def note_skipped(self, group: str, head: StreamCut) -> None:
        """Let the group know that events before ``head`` are deleted which it has not consumed."""


class _Budget:
    """How many bytes a writer may store before its stream is due."""

    def __init__(self, policy: RetentionPolicy) -> None:
        assert policy.max_bytes is not None
        self._max_bytes = policy.max_bytes
        self.limit = max(_LEAST_BYTES, int(policy.max_bytes * PRECISION))
        self.left = self.limit
        self.stored = 0  # since the policy was applied

    def renew(self, grown: int, kept: int) -> None:
        """Count from 0 again. The stream has ``kept`` bytes now.

        It has ``grown`` since the last time: other writers stored the rest, and will do so again.
        """
        share = self.stored / grown if grown > self.stored > 0 else 1.0
        room = min(max(self.limit, self._max_bytes + self.limit - kept), _MOST_LIMITS * self.limit)
        self.left, self.stored = int(room * share), 0


class _Lengths:
    """The lengths of a stream's data segments. The store is asked for each once: a policy is applied to one moment."""

    def __init__(self, data: DataSegments, state: StreamState, deadline: Deadline) -> None:
        self._data = data
        self._state = state
        self._deadline = deadline
        self._known: dict[int, int] = {}

    def of(self, numbers: Iterable[int]) -> Mapping[int, int]:
        """Return the lengths of these segments, perhaps with others."""
        if missing := set(numbers) - self._known.keys():
            self._known |= self._data.lengths(self._state, missing, self._deadline)
        return self._known


class Retention(DuePolicies):
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
        super().__init__(metadata, pending, REGISTRY)
        self._data = data
        self._truncate = truncate
        self._budgets: dict[str, _Budget] = {}
        self._subscribers_of_round: Subscribers | None = None
        #: Returns the groups of the store. Without a client there are none.
        self.groups: Callable[[], GroupsOfStreams] | None = None

    # ------------------------------------------------------------------ what writers and readers do

    def has_policy(self, state: StreamState) -> bool:
        return state.config.retention is not None

    def follow(self, state: StreamState) -> None:
        policy = state.config.retention
        with self._lock:
            if policy is None or policy.max_bytes is None:
                self._budgets.pop(state.name, None)
            elif state.name not in self._budgets:
                self._budgets[state.name] = _Budget(policy)
        super().follow(state)

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
                self._urge(stream)

    def _apply_due(self, urgent: Iterable[str]) -> float:
        self._subscribers_of_round = None
        return super()._apply_due(urgent)

    def apply(self, state: StreamState, deadline: Deadline) -> float:
        policy = state.config.retention
        assert policy is not None
        if self._subscribers_of_round is None:
            self._subscribers_of_round = self._subscribers(deadline)  # once, because this reads all groups
        try:
            self._apply(state, policy, self._subscribers_of_round.get(state.name, {}), deadline)
        except TruncatedError:  # another process is deleting what this one has looked at
            return INTERVAL_SECONDS
        return _interval(policy)

    def _subscribers(self, deadline: Deadline) -> Subscribers:
        """Return the subscribed groups. If one cannot be read there are none, so that nothing counts as consumed."""
        try:
            return {} if self.groups is None else self.groups().subscribers(deadline)
        except ClosedError:
            raise
        except ReaderGroupError as error:
            _logger.warning("retention applies only limits, because a reader group cannot be read: %s", error)
            return {}

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
            subscribers = self._subscribers(deadline).get(stream, {})
            try:
                decision, consumed = self._apply(state, policy, subscribers, deadline, dry_run=dry_run)
                break
            except TruncatedError:  # another process is deleting what this one has looked at
                if deadline.passed:
                    raise
        head = state.head if decision is None else decision.head
        lengths = self._data.lengths(state, state.reachable(state.head), deadline)
        kept = _size(state, head, lengths)
        with loading():
            from .report import RetentionReport

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

    def _apply(
        self,
        state: StreamState,
        policy: RetentionPolicy,
        subscribers: Mapping[str, Consumed],
        deadline: Deadline,
        *,
        dry_run: bool = False,
    ) -> tuple[Decision | None, Mapping[str, Offsets]]:
        stored = self._stored_history(state.name, deadline)
        lengths = _Lengths(self._data, state, deadline)
        history, grown = self._updated(state, stored, lengths)
        now = self._clock.time()
        while (found := gap(policy, history, now)) is not None:
            if (filled := self._filled(state, history, found, lengths, deadline)) is None:
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
        if decision is None:
            self._data.delete_retired(state, deadline)  # as after a truncation, of which there may be no other
        else:
            for group in decision.skipped:
                if self.groups is not None:
                    self.groups().note_skipped(group, state.cut(decision.head))
            state = self._truncate(state, decision.head, deadline)
        kept = _size(state, state.head, lengths.of(state.reachable(state.head)))
        history = history.thinned(now)
        # Lost to another process that applies the policy now, whose history is as good.
        self._replace_history(state.name, stored, history.encode())
        with self._lock:
            if (budget := self._budgets.get(state.name)) is not None:
                budget.renew(grown, kept)
        return decision, consumed

    def _updated(self, state: StreamState, stored: bytes | None, known: _Lengths) -> tuple[History, int]:
        """Return the history with a sample of now, and how many bytes came since the last one."""
        history = None if stored is None else History.decode(stored)
        for each in (history, History(state.incarnation, (Sample(float("-inf"), 0, state.head),))):
            if each is None or each.incarnation != state.incarnation or not _is_known(state, each.newest):
                continue
            try:
                lengths = known.of(state.reachable(each.newest.offsets))
            except NotFoundError:  # truncated by hand long ago
                continue
            grown = _size(state, each.newest.offsets, lengths)
            end = {number: lengths[number] for number in state.current}
            sample = Sample(self._clock.time(), each.newest.written + grown, Map(end))
            return self._from_head(state, each.with_sample(sample), known), grown
        raise NotFoundError("the stream was deleted meanwhile", stream=state.name)

    @staticmethod
    def _from_head(state: StreamState, history: History, known: _Lengths) -> History:
        """Return the history from the head on, without the bytes that are deleted.

        The head may be before a sample in one segment and after it in another, where all groups are further.
        """
        if history.samples[0].offsets == state.head:
            return history
        newest = history.newest
        replaced = (number for number in state.reachable(state.head) if number not in newest.offsets)
        lengths = {**known.of(replaced), **newest.offsets}
        first, *later = history.samples[_last_before_head(state, history) :]
        cuts = [state.later(state.head, each.offsets) for each in later]
        return history._replace(
            samples=tuple(
                Sample(each.at, newest.written - _size(state, cut, lengths), cut)
                for each, cut in zip([first, *later], [state.head, *cuts], strict=True)
            )
        )

    def _filled(
        self, state: StreamState, history: History, found: Gap, known: _Lengths, deadline: Deadline
    ) -> History | None:
        """Return the history with a sample at the limit in the gap, as the data itself shows it; None if it cannot."""
        before, after = found.before, found.after
        lengths = known.of(state.reachable(before.offsets))
        end = before.written + _size(state, before.offsets, lengths)
        if found.at is not None:
            backoff = self._metadata.backoff(deadline)
            cut, at = offsets_at(self._store, state, int(found.at * 1_000_000), backoff), found.at
        else:
            cut, at = (
                self._advanced(state, before.offsets, after.offsets, found.written - before.written, known),
                after.at,
            )
        cut = state.earlier(state.later(cut, before.offsets), after.offsets)
        written = end - _size(state, cut, lengths)
        if found.at is None and not before.written < written < after.written:
            return None
        return history.inserted(Sample(at, written, cut), after)

    def _advanced(self, state: StreamState, start: Offsets, end: Offsets, size: int, known: _Lengths) -> Offsets:
        """Return a cut about ``size`` bytes behind ``start``, up to ``end``: by epochs, then in proportion."""
        cut = dict(start)
        while True:
            ends = {**known.of(cut), **end}
            old = cut.keys() - end.keys() or set(cut)  # those that are read to their ends before the others begin
            available = sum(ends[number] - cut[number] for number in old)
            if size < available or not old.isdisjoint(end):
                break
            size -= available
            cut = with_successors(state, {**cut, **{number: ends[number] for number in old}}, old)
        for number in old:
            offset = cut[number]
            cut[number] = next_boundary(
                self._store,
                state.data_segment(number),
                offset + (ends[number] - offset) * size // max(1, available),
                known=offset,
                end=ends[number],
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


def _last_before_head(state: StreamState, history: History) -> int:
    """Return the index of the last sample that is nowhere behind the head; 0 if each is behind it somewhere."""
    first = 0
    for index, sample in enumerate(history.samples):
        if _is_known(state, sample) and not state.offsets_precede(sample.offsets, state.head):
            break
        first = index
    return first


def _is_known(state: StreamState, sample: Sample) -> bool:
    """Return whether the state has not forgotten the segments of the sample, long after they were truncated."""
    return sample.offsets.keys() <= state.segments.keys()
