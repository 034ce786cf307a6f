"""Decides how a stream that scales by itself is scaled now. Pure: the time and all rates are arguments.

The thresholds and times are those of Pravega's automatic scaling. `LoadTarget` has the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from synchronizer import InvalidArgumentError

from ..config import KeyRange, LoadTarget
from ..state import AnnounceScale, StreamState
from .rates import RateHistory

#: A segment is hot if it takes more than this many targets over the first, second or third window.
_HOT: Final = (5.0, 2.0, 1.0)
#: It is cold if it takes less than this many over each window.
_COLD: Final = (1.0, 1.0, 1.0, 0.5)
#: A segment with less than this part of an even share of the keys, which is 1 / max_segments, is not split. Among
#: max_segments busy keys, the chance that so narrow a range around one of them holds another is at most 1 in 64.
_LEAST_SHARE: Final = 1 / 64

#: The rates of a segment over the windows of a policy; None where they are not known.
Rates = Sequence[float | None]


class Decision(NamedTuple):
    """What is done now, and why."""

    reason: str
    action: Literal["split", "merge"] | None = None
    scale: AnnounceScale | None = None


class _Load:
    """The rates of the segments of a stream, compared with what its policy aims at."""

    def __init__(self, policy: LoadTarget, state: StreamState, rates: Mapping[int, Rates], ages: Mapping[int, float]):
        self.policy = policy
        self.state = state
        self.rates = rates
        self._ages = ages

    def is_wide(self, number: int) -> bool:
        """Return whether the segment's load can be that of several busy keys, so that a split divides it."""
        return _width(self.state, number) * self.policy.max_segments >= _LEAST_SHARE

    def is_settled(self, number: int) -> bool:
        """Return whether the segment is an original one, or its cooldown is over."""
        cools_down = self.state.segments[number].epoch > 0
        return not cools_down or self._ages.get(number, 0.0) >= self.policy.cooldown_seconds

    def hot(self, *numbers: int) -> int | None:
        """Return the index of the first window over which these segments together are hot; None if they are not."""
        for index, limit in enumerate(_HOT):
            over = [self.rates[number][index] for number in numbers]
            known = [each for each in over if each is not None]
            if len(known) == len(numbers) and sum(known) > limit * self.policy.target:
                return index
        return None

    def is_cold(self, number: int) -> bool:
        return all(
            each is not None and each < limit * self.policy.target
            for each, limit in zip(self.rates[number], _COLD, strict=True)
        )

    def most(self, number: int) -> float:
        """Return the highest known rate over the windows that count for a split."""
        return max((each for each in self.rates[number][: len(_HOT)] if each is not None), default=0.0)

    def recent(self, number: int) -> float:
        """Return the rate over the longest known window."""
        return next((each for each in reversed(self.rates[number]) if each is not None), 0.0)


def rates_of(policy: LoadTarget, state: StreamState, history: RateHistory | None, now: float) -> Mapping[int, Rates]:
    """Return the rates of the segments of the newest epoch. None is known if nobody has measured for a window."""
    unknown: Rates = (None,) * len(policy.windows)
    if history is None or history.incarnation != state.incarnation or history.unit != policy.unit:
        return dict.fromkeys(state.current, unknown)
    if now - history.newest.at > policy.window_seconds:
        return dict.fromkeys(state.current, unknown)
    return {
        number: tuple(history.rate(number, window) for window in policy.windows)
        if number in history.newest.counts
        else unknown
        for number in state.current
    }


def decide(policy: LoadTarget, state: StreamState, history: RateHistory | None, now: float) -> Decision:
    """Return what to do with the stream now.

    Args:
        policy: What its policy aims at.
        state: The stream's metadata.
        history: What was measured; None: nothing.
        now: Seconds since 1970.
    """
    if state.sealing:
        return Decision("the stream is sealed")
    if state.is_pending:
        return Decision("another change of the stream is not complete")
    rates = rates_of(policy, state, history, now)
    measured = {} if history is None else history.newest.counts
    ages = {number: history.age(number) for number in state.current if history is not None and number in measured}
    load = _Load(policy, state, rates, ages)
    count = len(state.current)
    if count < policy.min_segments:
        found = sorted(state.current, key=lambda n: (load.most(n), _width(state, n)), reverse=True)
        return _split(state, _into(found, policy.min_segments - count, lambda n: 2), "fewer than min_segments")
    if count > policy.max_segments:
        return _merge(load, pairwise(state.current), count - policy.max_segments, "more than max_segments")
    return _split_hot(load) or _merge_cold(load) or Decision(_calm(load))


def _split_hot(load: _Load) -> Decision | None:
    state, policy = load.state, load.policy
    hot = [number for number in _hot(load) if load.is_wide(number) and load.is_settled(number)]
    room = policy.max_segments - len(state.current)
    if not hot or not room:
        return None
    hot.sort(key=load.most, reverse=True)
    wanted = _into(hot, room, lambda n: min(policy.scale_factor, max(2, int(load.most(n) / policy.target))))
    return _split(state, wanted, _hot_reason(load, hot[0]))


def _hot(load: _Load) -> list[int]:
    return [number for number in load.state.current if load.hot(number) is not None]


def _into(numbers: Iterable[int], room: int, parts: Callable[[int], int]) -> Mapping[int, int]:
    """Return into how many parts each segment is split, the first ones first, for at most ``room`` more segments."""
    found: dict[int, int] = {}
    for number in numbers:
        if room > 0:
            found[number] = min(parts(number), room + 1)
            room -= found[number] - 1
    return found


def _split(state: StreamState, parts: Mapping[int, int], reason: str) -> Decision:
    ranges: list[KeyRange] = []
    split: list[int] = []
    for number in sorted(parts, key=lambda n: state.segments[n].keys.low):
        try:
            ranges += state.segments[number].keys.split(parts[number])
        except InvalidArgumentError:  # too narrow
            continue
        split.append(number)
    if not split:
        return Decision("no segment is wide enough to be split")
    return Decision(reason, "split", AnnounceScale(predecessors=tuple(split), ranges=tuple(ranges)))


def _merge_cold(load: _Load) -> Decision | None:
    pairs = _cold_pairs(load)
    spare = len(load.state.current) - load.policy.min_segments
    if not pairs or not spare:
        return None
    return _merge(load, pairs, spare, _cold_reason(load))


def _cold_pairs(load: _Load) -> list[tuple[int, int]]:
    """Return the neighbours that are cold, and not hot together."""
    cold = {number for number in load.state.current if load.is_cold(number)}
    return [each for each in pairwise(load.state.current) if cold.issuperset(each) and load.hot(*each) is None]


def _merge(load: _Load, pairs: Iterable[tuple[int, int]], most: int, reason: str) -> Decision:
    """Merge at most ``most`` of the pairs, those with the least load first, no segment twice."""
    merged: list[tuple[int, int]] = []
    taken: set[int] = set()
    for pair in sorted(pairs, key=lambda pair: load.recent(pair[0]) + load.recent(pair[1])):
        if len(merged) < most and taken.isdisjoint(pair):
            merged.append(pair)
            taken.update(pair)
    scales = [load.state.merge(pair) for pair in merged]
    scale = AnnounceScale(
        predecessors=tuple(number for each in scales for number in each.predecessors),
        ranges=tuple(keys for each in scales for keys in each.ranges),
    )
    return Decision(reason, "merge", scale)


def _width(state: StreamState, number: int) -> float:
    keys = state.segments[number].keys
    return keys.high - keys.low


# ---------------------------------------------------------------------- in words


def _hot_reason(load: _Load, number: int) -> str:
    index = load.hot(number)
    assert index is not None
    rate, window = load.rates[number][index], load.policy.windows[index]
    limit = "" if _HOT[index] == 1 else f"{_HOT[index]:g} times "
    return (
        f"segment {number} takes {rate:,.4g} {load.policy.unit}/s over {_time(window)}, more than {limit}the target of "
        f"{load.policy.target:,.4g}"
    )


def _cold_reason(load: _Load) -> str:
    return (
        f"neighbours take less than the target of {load.policy.target:,.4g} {load.policy.unit}/s, and less than half "
        f"of it over {_time(load.policy.windows[-1])}"
    )


def _calm(load: _Load) -> str:
    """Return why nothing is done, although no bound says so."""
    state, policy = load.state, load.policy
    if all(each is None for number in state.current for each in load.rates[number]):
        return f"the rates are not measured yet, which takes {_time(policy.window_seconds)}"
    hot = _hot(load)
    wide = [number for number in hot if load.is_wide(number)]
    hottest = _hot_reason(load, max(wide or hot, key=load.most)) if hot else ""
    if hot and not wide:
        return f"{hottest}; its range is too narrow to split, so its load is probably that of one routing key"
    if wide and len(state.current) >= policy.max_segments:
        return f"the stream has as many segments as max_segments allows; {hottest}"
    if wide:
        return f"a new segment is left alone until it is measured for {_time(policy.cooldown_seconds)}; {hottest}"
    if _cold_pairs(load):
        return "the stream has as few segments as min_segments allows"
    return "no segment is hot, and no neighbours are cold for long enough"


def _time(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
