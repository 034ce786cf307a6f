"""Executors that are closed at the worst moments."""

from __future__ import annotations

import threading
from typing import Any

from readergroup.scaling.executors import LoopExecutor
from readergroup.scaling.in_flight import InFlight, Item
from readergroup.streams.config import SegmentId
from tests.waiting import until

NAME = "a test of executors"


class ClosedWhileItGivesItems:
    """A source whose executor is closed by another thread right before it begins what it has taken."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.ended: list[BaseException | None] = []
        self._flight: InFlight[str] = InFlight()
        self._flight.add(SegmentId("shop/orders/0"), 1, [Item("one", "a", 1), Item("two", "b", 2)])
        self.executor = LoopExecutor(self, self.handle, 10, None, NAME)

    async def handle(self, what: str) -> None:
        raise AssertionError("it was closed before")

    def take(self, most: int) -> list[Item[Any]]:
        taken = [item for item in (self._flight.take(0.0) for _ in range(most)) if item is not None]
        if taken:
            closing = threading.Thread(target=self.executor.close)
            closing.start()
            closing.join()
        return taken

    def finish(self, item: Item[Any], error: BaseException | None) -> None:
        self.ended.append(error)

    def check(self, returned: object, what: Any) -> None: ...

    def seconds_until_due(self) -> float | None:
        return None


def test_a_loop_that_is_closed_before_the_first_step_of_its_tasks_ends() -> None:
    source = ClosedWhileItGivesItems()
    source.executor.wake(2)
    until(lambda: not any(thread.name == f"{NAME} loop" for thread in threading.enumerate()))
    assert len(source.ended) == 2
