"""How much work each segment is, from its rate and lag, and how much of a change a group records at once.

A weight is the exponent of a power of two. Only its difference from other weights has a meaning, so the zero point is
free. It is chosen such that few weights change: neither a change of all loads by the same factor nor the change of one
load changes the weights of the other segments.

Time is not an argument here: `load` decides how often a group is weighed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, inf, log2
from typing import Final

from readergroup.streams.config import SegmentId
from synchronizer import Revision

from . import balance
from .state import ReaderGroupState
from .updates import AddEpoch, RecordWeights

#: A segment's lag counts as the rate at which it would be worked off in this time.
LAG_SECONDS: Final = 60.0
#: Below this load of the whole group, in bytes per second, single events would decide: the weights stay.
LEAST_LOAD: Final = 1024.0
#: The weight of an average load, the preferred one first. Loads below the average by more than this factor weigh 0.
_AVERAGES: Final = (3.0, 3.5, 2.5, 4.0, 2.0, 4.5, 5.0)
#: A weight changes when the load is off by more than this factor, as a power of two.
_HYSTERESIS: Final = 1.0
#: Segments get weights when their loads differ by more than this factor, as a power of two, and lose them below half.
_SKEW: Final = 2.0
_HEAVIEST: Final = 40
#: One record moves this many segments, or this share of the segments if that is more.
_MOVES: Final = 8
_SHARE: Final = 1 / 4


def weights(
    rates: Mapping[SegmentId, float], lags: Mapping[SegmentId, float], previous: Mapping[SegmentId, int]
) -> dict[SegmentId, int]:
    """Return the weight of each segment in ``rates``: its previous one unless its load has changed clearly.

    All weigh 0 while their loads are alike. Rates are in bytes per second, lags in bytes; a segment without a previous
    weight has 0.
    """
    loads = {
        segment: max(0.0, rate) + max(0.0, lags.get(segment, 0.0)) / LAG_SECONDS for segment, rate in rates.items()
    }
    before = {segment: previous.get(segment, 0) for segment in loads}
    total = sum(loads.values())
    if not LEAST_LOAD <= total < inf:
        return before
    ratios = {segment: load * len(loads) / total for segment, load in loads.items()}
    exponents = {segment: log2(ratio) if ratio else -inf for segment, ratio in ratios.items()}
    is_weighed = len(set(before.values())) > 1
    skew = max(exponents.values()) - max(min(exponents.values()), -_AVERAGES[0])
    if skew < (_SKEW / 2 if is_weighed else _SKEW):
        return dict.fromkeys(loads, 0)
    candidates = [_weights(exponents, before, zero) for zero in (_AVERAGES if is_weighed else _AVERAGES[:1])]
    return min(candidates, key=lambda each: sum(each[segment] != before[segment] for segment in each))


def _weights(
    exponents: Mapping[SegmentId, float], before: Mapping[SegmentId, int], average: float
) -> dict[SegmentId, int]:
    found = {}
    for segment, exponent in exponents.items():
        exact = min(max(exponent + average, 0.0), float(_HEAVIEST))
        stays = abs(exact - before[segment]) < _HYSTERESIS
        found[segment] = before[segment] if stays else round(exact)
    return found


def most_moves(state: ReaderGroupState) -> int:
    """Return how many segments one record may move."""
    return max(_MOVES, ceil(len(state.segments) * _SHARE))


def record(
    state: ReaderGroupState, rates: Mapping[SegmentId, float], lags: Mapping[SegmentId, float]
) -> list[RecordWeights]:
    """Return the update that records the weights by these rates and lags; an empty list if none has to change.

    It records as much of the change as brings at most `most_moves`, and at least one step of one segment. Nothing is
    recorded while segments move, so that moves do not add up.
    """
    if state.handing_over or balance.plan(state):
        return []
    known = {segment: found.weight for segment, found in state.segments.items() if segment in rates}
    after = weights({segment: rates[segment] for segment in known}, lags, known)
    steps = {segment: weight - known[segment] for segment, weight in after.items() if weight != known[segment]}
    for each in _milder(steps):
        update = RecordWeights(weights={segment: known[segment] + step for segment, step in sorted(each.items())})
        if len(balance.plan(update.apply_to(state, Revision(0, 0)))) <= most_moves(state):
            break
    return [update] if steps else []


def inherited(state: ReaderGroupState, epoch: AddEpoch) -> list[RecordWeights]:
    """Return the update that gives new segments their shares of the weights of their predecessors, by key range.

    Without it, the parts of a hot segment would count as idle until they are measured. The default weight needs no
    update.
    """
    found = {}
    for segment, new in epoch.segments.items():
        load = 0.0
        predecessors = [state.segments[predecessor] for predecessor in new.predecessors]
        for before in predecessors:
            shared = min(new.high, before.high) - max(new.low, before.low)
            load += before.load * max(0.0, shared) / (before.high - before.low)
        weight = min(round(log2(max(load, 1.0))), _HEAVIEST)
        if weight and any(before.weight for before in predecessors):
            found[segment] = weight
    return [RecordWeights(weights=found)] if found else []


def _milder(steps: Mapping[SegmentId, int]) -> Iterator[Mapping[SegmentId, int]]:
    """Yield the steps, then less and less: all steps halved, then half of the segments, the greatest loads first."""
    while any(abs(step) > 1 for step in steps.values()):
        yield steps
        steps = {segment: int(step / 2) or (1 if step > 0 else -1) for segment, step in steps.items()}
    order = sorted(steps, key=lambda segment: (-steps[segment], segment))
    while order:
        yield {segment: steps[segment] for segment in order}
        order = order[: len(order) // 2]
