"""Event loops in the threads of a simulation: the product's tasks, timers and cancellations, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .threads import Event, Simulation


class Loop(asyncio.BaseEventLoop):
    """An event loop whose thread gives way to others when it has nothing to do. Its callbacks must not block."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._selector = self
        self._woken = Event(simulation)
        # Of a process that is killed, tasks are left, about which asyncio complains.
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._simulation.now

    def select(self, timeout: float | None) -> Sequence[Any]:
        """Wait as the selector of a real loop does. The threads of a simulation share the running loop meanwhile."""
        asyncio._set_running_loop(None)
        try:
            if timeout is not None and timeout <= 0:
                self._simulation.yield_now()
            else:
                self._woken.wait(timeout)
        finally:
            asyncio._set_running_loop(self)
        self._woken.clear()
        return ()

    def _process_events(self, events: Sequence[Any]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        self._woken.set()

    def _check_closed(self) -> None:
        """Accept what the tasks of a killed process call when they are collected."""


class SimAsyncio:
    """The module ``asyncio``, with loops of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def new_event_loop(self) -> Loop:
        return Loop(self._simulation)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)
