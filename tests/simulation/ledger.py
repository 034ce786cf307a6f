"""A user's state: a list that only grows, each update of which says how long it was when it was decided."""

from __future__ import annotations

from typing import Any, Final

import readergroup as rg
from synchronizer import Map, Revision, State, StateSynchronizer, Update


class Ledger(State):
    """Which entries there are, each with its place."""

    entries: Map[str, int] = Map()


class Enter(Update[Ledger], tag="enter"):
    """Put ``entry`` at the end, decided when there were ``seen`` others."""

    entry: str
    seen: int

    def apply_to(self, state: Ledger, revision: Revision) -> Ledger:
        if self.entry in state.entries:
            raise ValueError(f"{self.entry} is entered twice")
        if self.seen != len(state.entries):
            raise ValueError(f"{self.entry} saw {self.seen} entries, there are {len(state.entries)}")
        return state.replace(entries=state.entries.set(self.entry, self.seen))


class Strike(Update[Ledger], tag="strike"):
    """Take ``entry`` out. A newer release has it, and the others do not."""

    entry: str

    def apply_to(self, state: Ledger, revision: Revision) -> Ledger:
        return state.replace(entries=state.entries.delete(self.entry))


LEDGER_UPDATES: Final[tuple[type[Update[Any]], ...]] = (Enter,)


def open_ledger(client: rg.Client) -> StateSynchronizer[Ledger]:
    return client.synchronizer("ledger", initial=Ledger(), updates=LEDGER_UPDATES)
