"""What must hold over weeks: policies delete what they may and no more, and nothing that is stored or held grows."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from statistics import median
from types import FunctionType, MethodType, ModuleType
from typing import Final

from readergroup.group.model.state import ReaderGroupState
from readergroup.streams.config import RetentionPolicy
from readergroup.streams.retention.decision import Offsets
from readergroup.streams.state import CommitTransaction, StreamState, TruncateStream
from readergroup.streams.transactions.merging import PROGRESS
from synchronizer import Appended
from synchronizer.log.replica import Transition
from tests.places import PACKAGES

from .auditor import Auditor, StoredEvent
from .world import Done, World

#: How far the clocks of two processes differ at most.
CLOCKS_SECONDS: Final = 130.0
#: A stream may have this many times the bytes of its policy, and a limit deletes at most a quarter too much.
EXCESS: Final = 1.2
LEAST: Final = 0.75
#: A limit of age is met to an eighth.
AGE_EXCESS: Final = 1.125
#: How much later: the policy is applied once a minute in a shift, and perhaps again by another process.
LATE_SECONDS: Final = 600.0
#: So many truncations may fail to forget a segment before one has to.
CHANCES: Final = 6
#: How long a retired segment is kept at least.
DAY_SECONDS: Final = 24 * 3600.0
#: The time of day when a simulation begins.
EPOCH: Final = 1_600_000_000.0
#: What grew to this many times between the second and the last quarter of a run grows without end.
GROWTH: Final = 1.6


class GroupAuditor(Auditor):
    """Audits the streams and one group of several."""

    def __init__(self, world: World, log: str, before: Callable[[GroupAuditor, Transition[StreamState]], None]) -> None:
        super().__init__(world, log)
        self._before = before

    def done(self, done: Done) -> None:
        if done.segment == self.log or not done.segment.startswith("group/"):
            super().done(done)

    def _stream(self, done: Done, transition: Transition[StreamState]) -> None:
        self._before(self, transition)
        super()._stream(done, transition)
        if (after := transition.after) is not None and after.current:
            keys = [after.segments[number].keys for number in after.current]
            if [each.low for each in keys] != [0.0, *(each.high for each in keys[:-1])] or keys[-1].high != 1.0:
                self.broken("S3", f"the segments of {after.name} do not cover each key once: {keys}")

    @property
    def state(self) -> ReaderGroupState:
        state: ReaderGroupState = self.folds[self.log].replica.state
        return state


class RetentionAudit:
    """What a policy deletes it may delete: too old, too much, or consumed by all subscribed groups (S2)."""

    def __init__(self, world: World, policy: RetentionPolicy, stream: str, pause: float) -> None:
        self.policy = policy
        self.pause = pause  # without a process that applies it
        self.log = f"stream/{stream}"
        self.deletions = 0
        self.deleted_events = 0
        #: By name of the group. Set once they exist.
        self.subscribers: Mapping[str, GroupAuditor] = {}
        self._world = world
        self._ends: dict[str, list[tuple[int, float]]] = defaultdict(list)  # where each append ended, and when
        self._merged: dict[tuple[str, int], float] = {}  # those of transactions, and when these were committed
        self._committed_at = 0.0  # the last transaction
        self._largest = 0
        self._truncated_at: list[float] = []

    def note(self, done: Done) -> None:
        if done.verb == "append" and done.data and done.segment.startswith("data/"):
            if not isinstance(done.result, Appended):
                return
            end = done.result.offset + len(done.data)
            self._ends[done.segment].append((end, self._world.simulation.now))
            if PROGRESS in done.attributes:
                self._merged[done.segment, end] = self._committed_at
            self._largest = max(self._largest, len(done.data))

    def written_at(self, segment: str, end: int) -> float:
        """When an event was written. If another process had to merge its transaction, that was long before."""
        to, at = next((to, at) for to, at in self._ends[segment] if to >= end)
        return self._merged.get((segment, to), at)

    def length(self, segment: str) -> int:
        return self._ends[segment][-1][0] if self._ends[segment] else 0

    def size(self, state: StreamState, head: Offsets) -> int:
        return sum(self.length(state.data_segment(n)) - head.get(n, 0) for n in state.reachable(head))

    # ------------------------------------------------------------------ what is deleted

    def check(self, auditor: GroupAuditor, transition: Transition[StreamState]) -> None:
        """Called before the auditor counts what is deleted as given up."""
        before, after = transition.before, transition.after
        if any(isinstance(each, CommitTransaction) for each in transition.updates):
            self._committed_at = self._world.simulation.now
        if before is None or after is None or not any(isinstance(each, TruncateStream) for each in transition.updates):
            return
        self.deletions += 1
        self._truncated_at.append(self._world.simulation.now)
        kept = self.size(after, after.head)
        too_much = self.policy.max_bytes is not None and kept >= LEAST * self.policy.max_bytes - 2 * self._largest
        for segment, event in self._deleted(auditor, before, after):
            self.deleted_events += 1
            age = self._world.simulation.now - self.written_at(segment, event.end)
            if too_much or self._is_too_old(age):
                continue
            missed = self._missed_by(segment, event)
            if missed is None and self.policy.consumed_by and self._may_go(age):
                continue
            auditor.broken(
                "S2",
                f"{segment} {event} is deleted at an age of {age:.0f} s with {kept} bytes left, unread by {missed}",
            )
            return

    def _deleted(
        self, auditor: GroupAuditor, before: StreamState, after: StreamState
    ) -> Iterator[tuple[str, StoredEvent]]:
        left = after.reachable(after.head)
        for number in before.reachable(before.head):
            name = before.data_segment(number)
            if (data := auditor.data.get(name)) is None:
                continue
            start, end = before.head.get(number, 0), after.head.get(number, 0) if number in left else data.end
            for event in data.events:
                if start <= event.offset < end:
                    yield name, event

    def _is_too_old(self, age: float) -> bool:
        limit = self.policy.max_age
        return limit is not None and age >= limit.total_seconds() - CLOCKS_SECONDS

    def _may_go(self, age: float) -> bool:
        limit = self.policy.min_age
        return limit is None or age >= limit.total_seconds() - CLOCKS_SECONDS

    def _missed_by(self, segment: str, event: StoredEvent) -> str | None:
        for name, auditor in self.subscribers.items():
            data = auditor.data.get(segment)
            if data is None or data.frontier < event.end:
                return name
        return None

    # ------------------------------------------------------------------ what is left

    def check_rest(self, auditor: GroupAuditor) -> None:
        """After a round of the policy, without faults, on a stream that nobody writes."""
        state: StreamState = auditor.folds[self.log].replica.state
        size = self.size(state, state.head)
        if self.policy.max_bytes is not None and size > EXCESS * self.policy.max_bytes:
            auditor.broken("R1", f"the stream has {size} bytes, its policy allows {self.policy.max_bytes}")
        self._check_forgotten(auditor, state)
        if self.policy.max_age is None:
            return
        for number in state.reachable(state.head):
            segment, start = state.data_segment(number), state.head.get(number, 0)
            left = [at for end, at in self._ends[segment] if end > start]
            age = self._world.simulation.now - left[0] if left else 0.0
            if age > AGE_EXCESS * self.policy.max_age.total_seconds() + self.pause + LATE_SECONDS:
                auditor.broken("R1", f"{segment} has events that are {age:.0f} s old")

    def _check_forgotten(self, auditor: GroupAuditor, state: StreamState) -> None:
        """A segment that is retired for a day is forgotten by one of the next truncations (R2)."""
        for number, each in state.segments.items():
            if each.retired_at is None:
                continue
            due = each.retired_at - EPOCH + DAY_SECONDS + CLOCKS_SECONDS
            if sum(at > due for at in self._truncated_at) > CHANCES:
                auditor.broken("R2", f"segment {number} was to be forgotten at {due:.0f} s")


class Growth:
    """How much is stored, and how much a process holds, from time to time: it does not depend on how long they ran."""

    def __init__(self, world: World, stream: str) -> None:
        self._world = world
        self._log = f"stream/{stream}"
        self.samples: list[dict[str, int]] = []

    def sample(self, auditor: GroupAuditor, resident: object) -> None:
        there = self._world.memory._memory.segments
        segments = [each for each in there.values() if each is not None]
        stream: StreamState = auditor.folds[self._log].replica.state
        others = [each for each in segments if not each.name.startswith("data/")]
        self.samples.append(
            {
                "segments": len(segments),
                "attributes": sum(len(each.attributes) for each in segments),
                "bytes of attributes": sum(len(v) for each in segments for v in each.attributes.values()),
                "bytes beside the events": sum(len(each.data) for each in others),
                # Any process completes a scale, so the name of a retired segment stays used up.
                "used-up names": sum(each is None for each in there.values()) - stream.next_number,
                "segments in the metadata": len(stream.segments),
                "transactions in the metadata": len(stream.transactions.committers),
                "readers of the group": len(auditor.state.readers),
                "held in memory": held_by(resident),
            }
        )

    def check(self, auditor: Auditor, slack: Mapping[str, int]) -> None:
        quarter = len(self.samples) // 4
        for name in self.samples[0]:
            values = [each[name] for each in self.samples]
            early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
            if late > GROWTH * early + slack.get(name, 10):
                auditor.broken("R2", f"{name} grew from {early} to {late}: {values[:: max(1, len(values) // 20)]}")


#: What leads from an object of the product to what is not its own.
_NOT_OWNED: Final = (type, ModuleType, FunctionType, MethodType)


def held_by(root: object) -> int:
    """How many objects of the product and entries of containers are reachable from ``root``."""
    seen = {id(root)}
    waiting, count = [root], 0
    while waiting:
        found = waiting.pop()
        count += len(found) if isinstance(found, (dict, list, set, frozenset, tuple)) else 1
        for each in gc.get_referents(found):
            if id(each) not in seen and _is_owned(type(each)):
                seen.add(id(each))
                waiting.append(each)
    return count


@cache
def _is_owned(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in (*PACKAGES, "builtins", "collections", "functools", "weakref") and not issubclass(
        kind, _NOT_OWNED
    )
