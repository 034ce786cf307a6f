"""How many readers a group should have: one pure function of what is seen, what was decided before, and the time."""

from __future__ import annotations

import math
from typing import Annotated, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from synchronizer import Revision
from synchronizer.configuration import Configuration

#: A group is calm while its lag is under this part of the target: between that and the target nothing changes.
CALM: Final = 0.5


class ReaderScalingPolicy(Configuration):
    """Between how many readers a group is to have, and what makes it more or fewer. Durations are seconds.

    More than the target of lag: more readers at once, in proportion. As many more as there are more segments, as soon
    as events wait. Never more than there are segments to read, unless ``min_readers`` asks for it. One fewer when the
    lag has been under half of the target for the cooldown, and the last change is as long ago. The lag is that of
    committed positions, so a target under twice the group's ``position_interval_seconds`` is seldom met.
    """

    min_readers: Annotated[int, Field(strict=True, ge=1)] = 1
    max_readers: Annotated[int, Field(strict=True, ge=1)]
    target_lag_seconds: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 5.0
    cooldown_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 30.0

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_readers > self.max_readers:
            raise ValueError(f"min_readers is {self.min_readers} and max_readers {self.max_readers}")
        return self


class ScalingDecision(BaseModel):
    """How many readers there should be, and why."""

    model_config = ConfigDict(frozen=True)

    desired_readers: int
    current_readers: int
    reason: str
    #: Of the group's state that was looked at.
    revision: Revision


class GroupLoad(NamedTuple):
    """What a decision looks at."""

    #: The newest ones that are not completed.
    number_of_segments: int
    number_of_readers: int
    events_behind: int
    #: Of the segment that is most behind.
    seconds_behind: float
    revision: Revision


class ScalingHistory(NamedTuple):
    """What a decision has to know of those before it. Times are of the clock that `decide` is given."""

    desired_readers: int
    #: Without those that came while nothing waited. None: not known, so that the next look finds no growth.
    number_of_segments: int | None
    #: When load, and not a bound, changed the number.
    changed_at: float
    calm_since: float | None


def decide(
    policy: ReaderScalingPolicy, load: GroupLoad, history: ScalingHistory | None, now: float
) -> tuple[ScalingDecision, ScalingHistory]:
    """The decision at ``now``, and the history for the next one. The first has none: it starts from the readers that
    are there. To decide again on the same load at the same time, with a cooldown, changes nothing."""
    most = max(policy.min_readers, min(policy.max_readers, load.number_of_segments))
    before = load.number_of_readers if history is None else history.desired_readers
    calm_since = _calm_since(policy, load, history, now)
    wanted, reason = _wanted(policy, load, history, before, calm_since, now)
    desired = min(max(wanted, policy.min_readers), most)
    if desired < wanted and desired <= before:
        reason = _bound(policy, load)
    elif desired > wanted:
        reason = f"at least {_count(policy.min_readers, 'reader')}"
    # By load, also where a bound would have asked for the same.
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
    """How many the load asks for, bounds aside, and why."""
    settled = history is None or now - history.changed_at >= policy.cooldown_seconds
    lag, target = load.seconds_behind, policy.target_lag_seconds
    if load.events_behind and lag > target and settled:
        # Who is behind by twice the target reads half as fast as wished, roughly.
        return math.ceil(
            max(1, before) * min(lag / target, policy.max_readers)
        ), f"{lag:.1f} s behind, over {target:g} s"
    known = None if history is None else history.number_of_segments
    if known is not None and load.number_of_segments > known and load.events_behind:
        return before + load.number_of_segments - known, f"segments grew from {known} to {load.number_of_segments}"
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
