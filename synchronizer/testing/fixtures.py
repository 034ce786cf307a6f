"""Fixtures for pytest. Put ``pytest_plugins = ["synchronizer.testing"]`` into your ``conftest.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

import pytest

from ..errors import ClosedError, DeadlineExceededError
from ..state import S, Update
from ..state_synchronizer import StateSynchronizer
from ..stores import open_store
from .failing_store import FailingStore
from .instant_clock import InstantClock


class TwoReplicas(Protocol):
    """The type of the fixture ``two_replicas``."""

    def __call__(
        self, initial: S, updates: Iterable[type[Update[S]]], /
    ) -> tuple[StateSynchronizer[S], StateSynchronizer[S]]: ...


@pytest.fixture
def manual_clock() -> InstantClock:
    """Return a clock that moves when the test advances it or waits, so that no wait takes real time."""
    return InstantClock()


@pytest.fixture
def failing_store(manual_clock: InstantClock) -> Iterator[FailingStore]:
    """Yield an empty store in memory with the faults that the test orders."""
    with FailingStore(open_store("memory://", clock=manual_clock)) as store:
        yield store
        store.unavailable, store.before, store.after = False, None, None  # so that the test's resources can be closed


@pytest.fixture
def two_replicas(failing_store: FailingStore, manual_clock: InstantClock) -> Iterator[TwoReplicas]:
    """Yield a function that opens two replicas of a new state, as two processes would.

    ``one, other = two_replicas(initial, updates)``: the first uses ``failing_store``, the second the same store without
    the faults. Each call creates another state.
    """
    with ExitStack() as closing:
        numbers = count()

        def opened(
            initial: S, updates: Iterable[type[Update[S]]], /
        ) -> tuple[StateSynchronizer[S], StateSynchronizer[S]]:
            classes = list(updates)
            name = f"tested/{next(numbers)}"

            def replica(store: FailingStore) -> StateSynchronizer[S]:
                synchronizer = StateSynchronizer(store, name, initial=initial, updates=classes, clock=manual_clock)
                closing.callback(synchronizer.close)
                manual_clock.run_when_due(partial(_tell, synchronizer))
                return synchronizer

            return replica(failing_store), replica(FailingStore(failing_store.inner))

        yield opened


def _tell(synchronizer: StateSynchronizer[Any]) -> float:
    with suppress(ClosedError, DeadlineExceededError):  # the test closed it, or made the store unavailable
        synchronizer.poll_listeners(timeout=0.0)
    return math.inf
