"""Decides what the retention policy of a stream deletes now. Pure: the time and all positions are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Final, Literal, NamedTuple

from ..config import RetentionPolicy
from ..state import StreamState
from .history import PRECISION, History, Sample

#: A limit of size may delete this part of itself too much before the data is read to find a better cut: while a writer
#: is at full speed, samples are far apart, and the reading would cost more than all the rest.
_COARSE: Final = 1 / 4

Reason = Literal["max_age", "max_bytes", "consumed"]
Offsets = Mapping[int, int]


class Decision(NamedTuple):
    """The new head of the stream, and why."""

    head: Offsets
    reason: Reason
    #: The subscribed groups that have not consumed all that is deleted.
    skipped: tuple[str, ...] = ()


class Gap(NamedTuple):
    """A limit lies between two samples, so far from the later one that much less than the limit would remain."""

    before: Sample
    after: Sample
    #: The time of the limit, or None for a limit of size.
    at: float | None = None
    #: The limit of size, as `Sample.written`.
    written: int = 0


def decide(
    policy: RetentionPolicy, state: StreamState, history: History, now: float, consumed: Mapping[str, Offsets]
) -> Decision | None:
    """Return what to delete now; None for nothing.

    Args:
        policy: The stream's policy.
        state: The stream's metadata.
        history: Its newest sample is of now.
        now: Seconds since 1970.
        consumed: How far each subscribed group has consumed the stream.
    """
    decision: Decision | None = None
    limit, reason = _limit(policy, state, history, now)
    if limit is not None and not _covers(state, state.head, limit.offsets):
        head = state.later(state.head, limit.offsets)
        skipped = sorted(name for name, cut in consumed.items() if not _covers(state, cut, head))
        decision = Decision(head, reason, tuple(skipped))
    done = _consumed(policy, state, history, now, consumed)
    if done is not None and not _covers(state, decision.head if decision else state.head, done):
        if decision is None:
            return Decision(state.later(state.head, done), "consumed")
        return decision._replace(head=state.later(decision.head, done))
    return decision


def _limit(policy: RetentionPolicy, state: StreamState, history: History, now: float) -> tuple[Sample | None, Reason]:
    """Return the sample up to which events are deleted whether or not they are read."""
    found: list[tuple[Sample, Reason]] = []
    if policy.max_age is not None:
        old = [each for each in history.samples if each.at <= now - policy.max_age.total_seconds()]
        found += [(each, "max_age") for each in old[-1:]]
    if policy.max_bytes is not None:
        found.append((_last_within(policy.max_bytes, state, history), "max_bytes"))
    return max(found, key=lambda each: each[0].written, default=(None, "max_age"))


def _last_within(size: int, state: StreamState, history: History) -> Sample:
    """Return the first sample from which on there are at most ``size`` bytes.

    If something has to be deleted, a little more is, so that the next deletion is not due at once.
    """
    remaining = [(history.newest.written - each.written, each) for each in history.samples]
    first = next(each for left, each in remaining if left <= size)
    if _covers(state, state.head, first.offsets):
        return first
    return next(
        (each for left, each in remaining if (1 - 2 * PRECISION) * size <= left <= (1 - PRECISION) * size), first
    )


def _consumed(
    policy: RetentionPolicy, state: StreamState, history: History, now: float, consumed: Mapping[str, Offsets]
) -> Offsets | None:
    """Return the cut up to which events are consumed by all subscribed groups, and not kept nevertheless."""
    if policy.consumed_by is None or not consumed:
        return None
    bounds = list(consumed.values())
    if policy.min_age is not None:
        old = [each for each in history.samples if each.at <= now - policy.min_age.total_seconds()]
        bounds += [each.offsets for each in old[-1:] or history.samples[:1]]
    if policy.min_bytes is not None:
        large = [each for each in history.samples if history.newest.written - each.written >= policy.min_bytes]
        bounds += [each.offsets for each in large[-1:] or history.samples[:1]]
    return reduce(state.earlier, bounds)


def _covers(state: StreamState, cut: Offsets, other: Offsets) -> bool:
    """Return whether ``cut`` is nowhere before ``other``."""
    return state.offsets_precede(other, cut)


def gap(policy: RetentionPolicy, history: History, now: float) -> Gap | None:
    """Return a gap in the history that makes a limit delete much too much, or much too late."""
    pairs = list(zip(history.samples, history.samples[1:], strict=False))
    if policy.max_age is not None:
        age = policy.max_age.total_seconds()
        at = now - age
        for before, after in pairs:
            if before.at <= at < after.at and min(at - before.at, after.at - at) > 2 * PRECISION * age:
                return Gap(before, after, at=at)
    if policy.max_bytes is not None:
        target = history.newest.written - policy.max_bytes
        for before, after in pairs:
            if before.written < target <= after.written and after.written - target > _COARSE * policy.max_bytes:
                return Gap(before, after, written=target)
    return None
