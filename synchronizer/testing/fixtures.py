"""Fixtures for pytest: ``pytest_plugins = ["synchronizer.testing"]`` in your ``conftest.py``."""

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
    """What the fixture ``two_replicas`` is."""

    def __call__(
        self, initial: S, updates: Iterable[type[Update[S]]], /
    ) -> tuple[StateSynchronizer[S], StateSynchronizer[S]]: ...


@pytest.fixture
def manual_clock() -> InstantClock:
    """A clock that moves when the test advances it, or waits: nothing takes real time."""
    return InstantClock()


@pytest.fixture
def failing_store(manual_clock: InstantClock) -> Iterator[FailingStore]:
    """An empty store in memory, which has the faults that the test orders."""
    with FailingStore(open_store("memory://", clock=manual_clock)) as store:
        yield store
        store.unavailable, store.before, store.after = False, None, None  # what the test opened can be closed


@pytest.fixture
def two_replicas(failing_store: FailingStore, manual_clock: InstantClock) -> Iterator[TwoReplicas]:
    """``one, other = two_replicas(initial, updates)``: one state as two processes have it.

    The first one is on ``failing_store``, the other one on the same store without the faults. Each call begins another
    state.
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
    with suppress(ClosedError, DeadlineExceededError):  # the test closed it, or has the store away
        synchronizer.poll_listeners(timeout=0.0)
    return math.inf
