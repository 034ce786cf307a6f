"""Members in order of joining: the state under membership, leader election, locks and barriers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, repeat
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from synchronizer.arguments import check_duration
from synchronizer.errors import InvalidArgumentError
from synchronizer.liveness.lease import lease_attribute, lease_value
from synchronizer.log.entries import Revision
from synchronizer.state import State, Update
from synchronizer.state_synchronizer import Proposal
from synchronizer.store import ANY, AttributeChange

MAX_TIMEOUT_SECONDS: Final = 86_400.0
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_SECONDS)]

#: As `Member.place`: the round ended before all parties arrived.
BROKEN: Final = -1

#: Why a member was removed: it left; its lease expired; another member joined with its id.
Cause = Literal["left", "dead", "replaced"]


class Member(BaseModel):
    """One stay of a member, from its `Join` to its `Leave`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    member: str
    #: The name of its lease, and of this stay.
    lease: str
    #: The token of its `Join`.
    incarnation: int
    #: At a barrier: the arrival index in its round, from 0 on, or `BROKEN`. None while it waits.
    place: int | None = None


class Members(State):
    """The present members in order of joining. The order of two members never changes."""

    #: A member whose lease is not renewed for this long counts as dead. Fixed while there are members.
    timeout_seconds: Timeout
    #: Of a semaphore: how many members, from the first on, hold it. None means one.
    places: int | None = None
    #: Of a barrier: how many parties pass together.
    parties: int | None = None
    members: tuple[Member, ...] = ()

    @property
    def first(self) -> Member | None:
        return self.members[0] if self.members else None

    @property
    def waiting(self) -> Sequence[Member]:
        """The parties that wait at a barrier."""
        return [each for each in self.members if each.place is None]

    def with_places(self, places: Iterable[int]) -> Members:
        """End the round: give these places to the waiting parties, in order."""
        left = iter(places)
        return self.replace(
            members=tuple(
                each.model_copy(update={"place": next(left)}) if each.place is None else each for each in self.members
            )
        )

    def find(self, lease: str) -> Member | None:
        return next((each for each in self.members if each.lease == lease), None)


class Join(Update[Members], tag="join"):
    """Add a member, last in order. The last party of a barrier completes its round."""

    member: str
    #: The attribute of the lease, created in the same step.
    lease: str
    #: The timeout from now on, if there are no other members.
    timeout_seconds: Timeout | None = None

    def apply_to(self, state: Members, revision: Revision) -> Members:
        if self.timeout_seconds is not None and not state.members:
            state = state.replace(timeout_seconds=self.timeout_seconds)
        joined = Member(member=self.member, lease=self.lease, incarnation=revision.token)
        state = state.replace(members=(*state.members, joined))
        complete = state.parties is not None and len(state.waiting) == state.parties
        return state.with_places(count()) if complete else state


class Leave(Update[Members], tag="leave"):
    """Remove a member, with its lease in the same step. Removing a waiting party breaks the round of its barrier."""

    member: str
    lease: str
    cause: Cause

    def apply_to(self, state: Members, revision: Revision) -> Members:
        gone = state.find(self.lease)
        if gone is None:
            raise InvalidArgumentError("the member is not present", member=self.member, lease=self.lease)
        state = state.replace(members=tuple(each for each in state.members if each.lease != self.lease))
        return state if state.parties is None or gone.place is not None else state.with_places(repeat(BROKEN))


class Break(Update[Members], tag="break"):
    """Break the round of a barrier for the parties that wait."""

    def apply_to(self, state: Members, revision: Revision) -> Members:
        return state.with_places(repeat(BROKEN))


UPDATES: Final = (Join, Leave, Break)


def empty_members(timeout_seconds: float, *, places: int | None = None, parties: int | None = None) -> Members:
    """Return the initial state: no members."""
    check_duration(timeout_seconds, "member_timeout_seconds", above_zero=True, finite=True)
    if timeout_seconds > MAX_TIMEOUT_SECONDS:
        raise InvalidArgumentError(
            "member_timeout_seconds must be at most 86400, which is one day", member_timeout_seconds=timeout_seconds
        )
    return Members(timeout_seconds=timeout_seconds, places=places, parties=parties)


def removing(
    members: Sequence[Member], cause: Cause, observed: Mapping[str, bytes] | None = None
) -> Proposal[Members, Sequence[Member]]:
    """Propose to remove these members with their leases, if these still have the ``observed`` values; None: any."""
    return Proposal(
        [Leave(member=each.member, lease=each.lease, cause=cause) for each in members],
        members,
        {
            lease_attribute(each.lease): AttributeChange(ANY if observed is None else lease_value(each, observed), None)
            for each in members
        },
    )
