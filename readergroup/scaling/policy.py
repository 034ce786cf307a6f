"""Decides how many readers a group should have: a pure function of the load, earlier decisions and the time."""

from __future__ import annotations

import math
from typing import Annotated, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from synchronizer import Revision
from synchronizer.configuration import Configuration

#: A group is calm while its lag is below this fraction of the target. Between that and the target nothing changes.
CALM: Final = 0.5
#: The most events that one reader handles at once.
MAX_CONCURRENCY: Final = 10_000


class ReaderScalingPolicy(Configuration):
    """The bounds for the number of readers of a group, and the lag that changes it. Durations are seconds.

    - A lag above the target adds readers in proportion, unless the number has changed within the cooldown.
    - New segments add as many readers, as soon as events wait and the readers can handle fewer events at once than
      there are segments.
    - A lag below half of the target for the whole cooldown removes one reader, at most one per cooldown.
    - There are never more readers than segments to read, except up to ``min_readers``.

    The lag is that of committed positions. A target below twice the group's ``position_interval_seconds`` is rarely
    met.

    Args:
        min_readers: The lower bound, 1 or more. Default: 1.
        max_readers: The upper bound, ``min_readers`` or more.
        target_lag_seconds: The lag to stay below, above 0. Default: 5.
        cooldown_seconds: The least time between a change by load and the next change by lag. Default: 30.
        concurrency: How many events each reader handles at once. A pool uses its own ``concurrency``. Default: 1.

    Raises:
        InvalidArgumentError: A bound or a duration is out of range.
    """

    min_readers: Annotated[int, Field(strict=True, ge=1)] = 1
    max_readers: Annotated[int, Field(strict=True, ge=1)]
    target_lag_seconds: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 5.0
    cooldown_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 30.0
    concurrency: Annotated[int, Field(strict=True, ge=1, le=MAX_CONCURRENCY)] = 1

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_readers > self.max_readers:
            raise ValueError(
                f"min_readers must not exceed max_readers: min_readers={self.min_readers} "
                f"max_readers={self.max_readers}"
            )
        return self


class ScalingDecision(BaseModel):
    """The desired number of readers, and the reason."""

    model_config = ConfigDict(frozen=True)

    desired_readers: int
    current_readers: int
    reason: str
    #: The revision of the group state that the decision is based on.
    revision: Revision


class GroupLoad(NamedTuple):
    """The load that a decision is based on."""

    #: The newest segments that are not completed.
    number_of_segments: int
    number_of_readers: int
    events_behind: int
    #: The lag of the segment that is most behind.
    seconds_behind: float
    revision: Revision


class ScalingHistory(NamedTuple):
    """The facts about earlier decisions that the next one needs. Times are those of the clock given to `decide`."""

    desired_readers: int
    #: Without segments that came while no events waited. None: unknown, so the next decision sees no growth.
    number_of_segments: int | None
    #: When the load, not a bound, last changed the number.
    changed_at: float
    calm_since: float | None


def decide(
    policy: ReaderScalingPolicy, load: GroupLoad, history: ScalingHistory | None, now: float
) -> tuple[ScalingDecision, ScalingHistory]:
    """Return the decision at ``now`` and the history for the next one.

    The first decision has no history and starts from the present readers. With a cooldown, a second decision on the
    same load at the same time changes nothing.
    """
    most = max(policy.min_readers, min(policy.max_readers, load.number_of_segments))
    before = load.number_of_readers if history is None else history.desired_readers
    calm_since = _calm_since(policy, load, history, now)
    wanted, reason = _wanted(policy, load, history, before, calm_since, now)
    desired = min(max(wanted, policy.min_readers), most)
    if desired < wanted and desired <= before:
        reason = _bound(policy, load)
    elif desired > wanted:
        reason = f"at least {_count(policy.min_readers, 'reader')}"
    # The load changes the number, even where a bound would do the same.
    changed = before < min(wanted, desired) or before > max(wanted, desired)
    changed_at = now if changed else float("-inf") if history is None else history.changed_at
    decision = ScalingDecision(
        desired_readers=desired, current_readers=load.number_of_readers, reason=reason, revision=load.revision
    )
    return decision, ScalingHistory(desired, _known_segments(load, history), changed_at, calm_since)


def _known_segments(load: GroupLoad, history: ScalingHistory | None) -> int:
    if load.events_behind or history is None or history.number_of_segments is None:
        return load.number_of_segments
    return min(load.number_of_segments, history.number_of_segments)


def _calm_since(
    policy: ReaderScalingPolicy, load: GroupLoad, history: ScalingHistory | None, now: float
) -> float | None:
    if load.events_behind and load.seconds_behind >= CALM * policy.target_lag_seconds:
        return None
    return now if history is None or history.calm_since is None else history.calm_since


def _wanted(
    policy: ReaderScalingPolicy,
    load: GroupLoad,
    history: ScalingHistory | None,
    before: int,
    calm_since: float | None,
    now: float,
) -> tuple[int, str]:
    """Return how many readers the load needs, regardless of bounds, and the reason."""
    settled = history is None or now - history.changed_at >= policy.cooldown_seconds
    lag, target = load.seconds_behind, policy.target_lag_seconds
    if load.events_behind and lag > target and settled:
        # Roughly, a group that is behind by twice the target reads half as fast as it should.
        return math.ceil(
            max(1, before) * min(lag / target, policy.max_readers)
        ), f"{lag:.1f} s behind, over {target:g} s"
    known = None if history is None else history.number_of_segments
    if known is not None and load.events_behind:
        useful = math.ceil(load.number_of_segments / policy.concurrency)
        grown = min(before + load.number_of_segments - known, useful)
        if grown > before:
            return grown, f"segments grew from {known} to {load.number_of_segments}"
    spare = before > policy.min_readers
    if spare and calm_since is not None and settled and now - calm_since >= policy.cooldown_seconds:
        return before - 1, f"under {CALM * target:g} s behind for {now - calm_since:.0f} s"
    return before, "nothing to change"


def _bound(policy: ReaderScalingPolicy, load: GroupLoad) -> str:
    if load.number_of_segments < policy.max_readers:
        return f"{_count(load.number_of_segments, 'segment')} to read"
    return f"at most {_count(policy.max_readers, 'reader')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
