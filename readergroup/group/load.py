"""Measures the load of a group's segments, in the one process of the group that records their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ..streams.config import SegmentId, data_segment, stream_of
from .model.positions import positions
from .model.state import ReaderGroupState
from .updater import GroupUpdater

#: How often the segments are measured, and at most recorded.
INTERVAL_SECONDS: Final = 30.0
#: A rate is the average over this many intervals, or fewer if there are fewer yet.
_INTERVALS: Final = 4
#: Between two steps, the coordinator does its other work.
SEGMENTS_PER_STEP: Final = 100


class _Sample(NamedTuple):
    at: float
    lengths: dict[SegmentId, int]


class LoadMeter:
    """Measures each segment once per interval, and from the second time on records the weights that changed."""

    def __init__(self, updater: GroupUpdater) -> None:
        self._updater = updater
        self._clock = updater.synchronizer.clock
        self._samples: deque[_Sample] = deque(maxlen=_INTERVALS + 1)
        self._due = float("-inf")
        self._begun: _Sample | None = None
        self._left: list[SegmentId] = []

    def step(self) -> float:
        """Measure some segments if that is due, and return when to call again."""
        now = self._clock.monotonic()
        if now < self._due:
            return self._due
        state = self._updater.state
        if self._begun is None:
            self._begun = _Sample(now, {})
            self._left = [segment for segment, found in state.segments.items() if not found.completed]
        self._begun.lengths.update(self._lengths(state, self._left[-SEGMENTS_PER_STEP:]))
        del self._left[-SEGMENTS_PER_STEP:]
        if self._left:
            return now
        # First, so that an error below puts the record off by an interval.
        sample, self._begun, self._due = self._begun, None, now + INTERVAL_SECONDS
        self._samples.append(sample)
        rates = self._rates()
        if rates:
            self._updater.record_weights(rates, self._lags(state, sample.lengths))
        return self._due

    def _lengths(self, state: ReaderGroupState, segments: Sequence[SegmentId]) -> Iterator[tuple[SegmentId, int]]:
        """Yield the lengths of those that exist, up to the end of the group."""
        names = {
            segment: data_segment(segment, state.streams[stream_of(segment)].incarnation)
            for segment in segments
            if segment in state.segments
        }
        infos = self._updater.synchronizer.store.infos(list(names.values()))
        for segment, name in names.items():
            if name in infos:
                length, end = infos[name].length, state.segments[segment].end
                yield segment, length if end is None else min(length, end)

    def _rates(self) -> Mapping[SegmentId, float]:
        """Return the bytes per second of each segment that was measured twice."""
        newest, rates = self._samples[-1], {}
        for segment, length in newest.lengths.items():
            first = next(sample for sample in self._samples if segment in sample.lengths)
            if first is not newest:
                rates[segment] = (length - first.lengths[segment]) / (newest.at - first.at)
        return rates

    def _lags(self, state: ReaderGroupState, lengths: Mapping[SegmentId, int]) -> Mapping[SegmentId, float]:
        offsets = positions(state, self._updater.leases())
        return {segment: float(length - offsets[segment]) for segment, length in lengths.items() if segment in offsets}
