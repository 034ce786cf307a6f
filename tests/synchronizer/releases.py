"""Two releases of one program, each a process that counts visits until it is told to stop: see test_rolling_upgrade."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from synchronizer import Revision, State, StateSynchronizer, UnknownUpdateError, Update, open_store


class OldVisits(State):
    number: int = 0


class OldVisit(Update[OldVisits], tag="visit"):
    people: int

    def apply_to(self, state: OldVisits, revision: Revision) -> OldVisits:
        return state.replace(number=state.number + self.people)


class NewVisits(State):
    number: int = 0
    last_door: str | None = None


class NewVisit(Update[NewVisits], tag="visit"):
    people: int
    door: str | None = None

    def apply_to(self, state: NewVisits, revision: Revision) -> NewVisits:
        visited = state.replace(number=state.number + self.people)
        return visited if self.door is None else visited.replace(last_door=self.door)


class Recount(Update[NewVisits], tag="recount"):
    """New in the second release."""

    def apply_to(self, state: NewVisits, revision: Revision) -> NewVisits:
        return state.replace(last_door=None)


class Report(NamedTuple):
    """What became of a process: how many visits it stored, what stopped it, and the state that it showed then."""

    stored: int
    stopped_by: UnknownUpdateError | None
    number: int


def visit(connection: Connection, url: str, release: str) -> None:
    """Write visits until told to stop.

    The release "old" has the old classes and "new" has the others; "door" and "recount" also write what is new.
    """
    with open_store(url) as store:
        if release == "old":
            old = StateSynchronizer(store, "visits", initial=OldVisits(), updates=[OldVisit])
            _repeat(connection, old, lambda: old.update_state_unconditionally(OldVisit(people=1)))
            return
        new = StateSynchronizer(store, "visits", initial=NewVisits(), updates=[NewVisit, Recount])
        updates: dict[str, tuple[Update[NewVisits], ...]] = {
            "new": (NewVisit(people=1),),
            "door": (NewVisit(people=1, door="north"),),
            "recount": (NewVisit(people=1), Recount()),
        }
        _repeat(connection, new, lambda: new.update_state_unconditionally(*updates[release]))


def _repeat(connection: Connection, visits: StateSynchronizer[Any], write: Callable[[], object]) -> None:
    stored, error = 0, None
    connection.send("ready")
    try:
        while not stored or not connection.poll():
            write()
            stored += 1
    except UnknownUpdateError as raised:
        error = raised
    connection.send(Report(stored, error, visits.state.number))
