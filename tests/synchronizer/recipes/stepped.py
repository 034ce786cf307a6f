"""Several "processes" in one: each has a store of its own, which fails on demand, and they share a clock.

The clock moves by hand, or while somebody waits, and nothing runs in the background: `World.step` is one round of what
all threads do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from synchronizer import Clock, StateSynchronizer, open_store
from synchronizer.recipes.coordination.members import UPDATES, Members
from synchronizer.testing import FailingStore, InstantClock

TIMEOUT = 10.0


class Stepped(Protocol):
    def step(self) -> float: ...


P = TypeVar("P", bound=Stepped)


class World:
    def __init__(self, url: str, closing: ExitStack) -> None:
        self.url = url
        self.clock = InstantClock()
        self._closing = closing
        self._running: list[Stepped] = []

    def store(self, clock: Clock | None = None) -> FailingStore:
        return self._closing.enter_context(FailingStore(open_store(self.url, clock=clock or self.clock)))

    def add(self, participant: P) -> P:
        """It takes its steps from now on."""
        self._running.append(participant)
        return participant

    def kill(self, participant: Stepped) -> None:
        """It does nothing any more."""
        self._running.remove(participant)

    def step(self) -> None:
        for participant in self._running:
            participant.step()

    def pass_time(self, seconds: float, step: float = 0.25) -> None:
        """Everybody who runs does what is due, again and again."""
        end = self.clock.monotonic() + seconds
        self.step()
        while self.clock.monotonic() < end:
            self.clock.advance(min(step, end - self.clock.monotonic()))
            self.step()

    def state(self, name: str) -> Members:
        """As it is in the store."""
        synchronizer = StateSynchronizer(
            self.store(), name, initial=Members(timeout_seconds=TIMEOUT), updates=UPDATES, clock=self.clock
        )
        return synchronizer.state


@contextmanager
def a_world(url: str) -> Iterator[World]:
    with ExitStack() as closing:
        yield World(url, closing)
