"""Who is there, in the order of coming: the state under membership, leader election, locks and barriers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from synchronizer.arguments import check_duration
from synchronizer.errors import InvalidArgumentError
from synchronizer.log.entries import Revision
from synchronizer.state import State, Update

MAX_TIMEOUT_SECONDS: Final = 86_400.0
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_SECONDS)]

#: As `Member.place`: not all have come.
BROKEN: Final = -1

#: Why a member is no longer there: it left; its lease ran out; another came with its id.
Cause = Literal["left", "dead", "replaced"]


class Member(BaseModel):
    """One stay of a member."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    member: str
    #: Names its lease, and this stay.
    lease: str
    #: The token of its `Join`.
    incarnation: int
    #: Of one who waited at a barrier: which of those he was that have passed it together, from 0 on, or `BROKEN`.
    place: int | None = None


class Members(State):
    """Those who are there, whoever came first at the front: who is before whom never changes."""

    #: How long a lease may stand still. It stays the same as long as anybody is there.
    timeout_seconds: Timeout
    #: How many of the first hold what all stand in line for, if that is not one.
    places: int | None = None
    #: At a barrier: how many pass it together.
    parties: int | None = None
    members: tuple[Member, ...] = ()

    @property
    def first(self) -> Member | None:
        return self.members[0] if self.members else None

    @property
    def waiting(self) -> Sequence[Member]:
        """Those who wait at a barrier."""
        return [each for each in self.members if each.place is None]

    def with_places(self, places: Iterable[int]) -> Members:
        """Nobody waits any more: these are the places of those who did."""
        left = iter(places)
        return self.replace(
            members=tuple(
                each.model_copy(update={"place": next(left)}) if each.place is None else each for each in self.members
            )
        )

    def find(self, lease: str) -> Member | None:
        return next((each for each in self.members if each.lease == lease), None)


class Join(Update[Members], tag="join"):
    """Come in, behind all others. The last one whom a barrier waits for lets all pass."""

    member: str
    #: The attribute of the lease, created in the same step.
    lease: str
    #: The timeout from now on, if nobody else is there.
    timeout_seconds: Timeout | None = None

    def apply_to(self, state: Members, revision: Revision) -> Members:
        if self.timeout_seconds is not None and not state.members:
            state = state.replace(timeout_seconds=self.timeout_seconds)
        joined = Member(member=self.member, lease=self.lease, incarnation=revision.token)
        state = state.replace(members=(*state.members, joined))
        complete = state.parties is not None and len(state.waiting) == state.parties
        return state.with_places(count()) if complete else state


class Leave(Update[Members], tag="leave"):
    """Be gone, with the lease, which is deleted in the same step. Who goes before all have come breaks a barrier."""

    member: str
    lease: str
    cause: Cause

    def apply_to(self, state: Members, revision: Revision) -> Members:
        gone = state.find(self.lease)
        if gone is None:
            raise InvalidArgumentError("this member is not there", member=self.member, lease=self.lease)
        state = state.replace(members=tuple(each for each in state.members if each.lease != self.lease))
        return state if state.parties is None or gone.place is not None else state.with_places(repeat(BROKEN))


class Break(Update[Members], tag="break"):
    """Those who wait at a barrier wait in vain."""

    def apply_to(self, state: Members, revision: Revision) -> Members:
        return state.with_places(repeat(BROKEN))


UPDATES: Final = (Join, Leave, Break)


def empty_members(timeout_seconds: float, *, places: int | None = None, parties: int | None = None) -> Members:
    """The state to begin with."""
    check_duration(timeout_seconds, "member_timeout_seconds", above_zero=True, finite=True)
    if timeout_seconds > MAX_TIMEOUT_SECONDS:
        raise InvalidArgumentError(
            "member_timeout_seconds is at most 86400, a day", member_timeout_seconds=timeout_seconds
        )
    return Members(timeout_seconds=timeout_seconds, places=places, parties=parties)
