"""Who is there, in the order of coming: the state under membership, leader election and locks."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import InvalidArgumentError
from ..revisioned import Revision
from ..state import State, Update

MAX_TIMEOUT_SECONDS: Final = 86_400.0
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_SECONDS)]

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


class Members(State):
    """Those who are there, whoever came first at the front: who is before whom never changes."""

    #: How long a lease may stand still. It stays the same as long as anybody is there.
    timeout_seconds: Timeout
    #: How many of the first hold what all stand in line for, if that is not one.
    places: int | None = None
    members: tuple[Member, ...] = ()

    @property
    def first(self) -> Member | None:
        return self.members[0] if self.members else None

    def find(self, lease: str) -> Member | None:
        return next((each for each in self.members if each.lease == lease), None)


class Join(Update[Members], tag="join"):
    """Come in, behind all others."""

    member: str
    #: The attribute of the lease, created in the same step.
    lease: str
    #: The timeout from now on, if nobody else is there.
    timeout_seconds: Timeout | None = None

    def apply_to(self, state: Members, revision: Revision) -> Members:
        if self.timeout_seconds is not None and not state.members:
            state = state.replace(timeout_seconds=self.timeout_seconds)
        joined = Member(member=self.member, lease=self.lease, incarnation=revision.token)
        return state.replace(members=(*state.members, joined))


class Leave(Update[Members], tag="leave"):
    """Be gone, with the lease, which is deleted in the same step."""

    member: str
    lease: str
    cause: Cause

    def apply_to(self, state: Members, revision: Revision) -> Members:
        if state.find(self.lease) is None:
            raise InvalidArgumentError("this member is not there", member=self.member, lease=self.lease)
        return state.replace(members=tuple(each for each in state.members if each.lease != self.lease))


UPDATES: Final = (Join, Leave)


def nobody(timeout_seconds: float, places: int | None = None) -> Members:
    """The state to begin with."""
    if not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidArgumentError(
            "a timeout is more than 0 and at most 86400 seconds", timeout_seconds=timeout_seconds
        )
    return Members(timeout_seconds=timeout_seconds, places=places)
