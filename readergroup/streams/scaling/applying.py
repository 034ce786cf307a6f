"""Applies the scaling policies of a store's streams. `maintenance` says when, and in which process.

The history of a stream in the registry is a `RateHistory`. Writers report nothing: the lengths of the segments show the
bytes, and the headers of the first blocks since the last measurement how many events these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from synchronizer import Deadline, Map, UnknownUpdateError, Update
from synchronizer.loggers import get_logger

from ..config import LoadTarget, ScalingReport
from ..data.boundaries import first_events
from ..data_segments import DataSegments
from ..maintenance import INTERVAL_SECONDS, DuePolicies
from ..metadata import StreamMetadata
from ..pending import PendingChanges
from ..state import StreamState
from .decision import Decision, decide, rates_of
from .rates import RateHistory, Sample

REGISTRY: Final = "readergroup/scaling"
#: A stream is measured this many times per shortest window.
_SAMPLES_PER_WINDOW: Final = 4

_FULL: Final = (
    "the stream's metadata is full; it has room for another scale a day after old segments are truncated, by "
    "streams.truncate or a retention policy, or when all processes connect with a higher state_limit_bytes"
)

_logger = get_logger(__name__)


class StreamScaling(DuePolicies):
    """The automatic scaling of the streams of one client. Threads may share it."""

    def __init__(self, metadata: StreamMetadata, data: DataSegments, pending: PendingChanges) -> None:
        super().__init__(metadata, pending, REGISTRY, shortest_interval_seconds=1.0 / _SAMPLES_PER_WINDOW)
        self._data = data

    def has_policy(self, state: StreamState) -> bool:
        return state.config.scaling.load is not None and not state.sealing

    def apply(self, state: StreamState, deadline: Deadline) -> float:
        policy = state.config.scaling.load
        assert policy is not None
        if state.is_pending:  # perhaps of a process that has died
            state = self._pending.finish(state.name, deadline)
        history = self._measure(state, policy, deadline)
        if history is not None:
            decision = decide(policy, state, history, history.newest.at)
            if decision.scale is not None:
                self._scale(state, decision, deadline)
        return min(INTERVAL_SECONDS, policy.window_seconds / _SAMPLES_PER_WINDOW)

    def _scale(self, state: StreamState, decision: Decision, deadline: Deadline) -> None:
        """Scale the stream, unless it has changed since the decision."""

        def announce(now: StreamState) -> Iterable[Update[StreamState]]:
            is_the_same = (now.incarnation, now.epoch, now.sealing, now.config.scaling) == (
                *(state.incarnation, state.epoch, False, state.config.scaling),
            )
            return [decision.scale] if is_the_same and decision.scale is not None else []

        after = self._pending.announce(state.name, announce, deadline)
        if after.epoch > state.epoch:
            _logger.info(
                "%s: from %d to %d segments: %s", state.name, len(state.current), len(after.current), decision.reason
            )

    # ------------------------------------------------------------------ measuring

    def _measure(self, state: StreamState, policy: LoadTarget, deadline: Deadline) -> RateHistory | None:
        """Add a sample of now to the stored history, and return it; None if another process does it now."""
        stored = self._stored_history(state.name, deadline)
        before = self._known(stored, state, policy)
        lengths = self._data.lengths(state, state.current, deadline)
        at = self._clock.time()
        if before is None:
            history = RateHistory(
                state.incarnation, policy.unit, (Sample(at, Map(dict.fromkeys(lengths, 0))),), Map(lengths)
            )
        else:
            counts, density = self._counts(state, before, lengths, policy)
            history = before.with_sample(Sample(at, Map(counts)), lengths, density, policy.windows[-1])
        return history if self._replace_history(state.name, stored, history.encode()) else None

    def _known(self, stored: bytes | None, state: StreamState, policy: LoadTarget) -> RateHistory | None:
        """Return the stored history, if it is of this stream and counts what the policy asks for."""
        history = None if stored is None else RateHistory.decode(stored)
        if history is None or (history.incarnation, history.unit) != (state.incarnation, policy.unit):
            return None
        return history

    def _counts(
        self, state: StreamState, before: RateHistory, lengths: Mapping[int, int], policy: LoadTarget
    ) -> tuple[Mapping[int, int], float]:
        """Return what each segment has taken by now, and the newest number of events in a byte."""
        counts = dict.fromkeys(lengths, 0)
        events = measured = 0.0
        densities: dict[int, float] = {}
        for number, length in lengths.items():
            start = before.lengths.get(number)
            if policy.unit == "events" and start is not None and length > start:
                found, size = first_events(self._store, state.data_segment(number), start, length)
                if size:
                    densities[number] = found / size
                    events, measured = events + found, measured + size
        density = events / measured if measured else before.density
        for number, length in lengths.items():
            if number in before.lengths:  # a segment begins to count when it is first seen
                per_byte = 1.0 if policy.unit == "bytes" else densities.get(number, density)
                grown = length - before.lengths[number]
                counts[number] = before.newest.counts[number] + round(grown * per_byte)
        return counts, density

    # ------------------------------------------------------------------ telling

    def report(self, state: StreamState, deadline: Deadline) -> ScalingReport | None:
        """Return what was measured, and what it leads to; None if the stream does not scale by itself."""
        policy = state.config.scaling.load
        if policy is None:
            return None
        try:
            history = self._known(self._stored_history(state.name, deadline), state, policy)
        except UnknownUpdateError:
            history = None
        now = self._clock.time()
        decision = decide(policy, state, history, now)
        if decision.scale is not None and not self._metadata.has_room_for(decision.scale, state):
            decision = Decision(_FULL)
        return ScalingReport(
            unit=policy.unit,
            windows_seconds=policy.windows,
            rates={
                state.segment(number): tuple(rates) for number, rates in rates_of(policy, state, history, now).items()
            },
            measured_at=None if history is None else history.newest.at,
            action=decision.action,
            segments=() if decision.scale is None else tuple(map(state.segment, decision.scale.predecessors)),
            reason=decision.reason,
        )
