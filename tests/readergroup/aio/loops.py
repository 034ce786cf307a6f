"""Event loops for tests: a loop of its own for each, what makes the store hang, and waiting for conditions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import readergroup as rg
from synchronizer.testing import FailingStore, Operation
from tests.waiting import PATIENCE_SECONDS

R = TypeVar("R")

STREAM = "shop/orders"


def run(test: Coroutine[Any, Any, R]) -> R:
    """Run on a loop that must come to an end."""

    async def in_time() -> R:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await test

    return asyncio.run(in_time())


async def until(condition: Callable[[], object], what: str = "what is awaited") -> None:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not in time: {what}") from None


class HangingStore(FailingStore):
    """A store whose calls do not return while it hangs, as behind a network that drops everything."""

    def __init__(self, store: rg.SegmentStore | None = None) -> None:
        super().__init__(store or rg.connect("memory://").store)
        self._answers = threading.Event()
        self._answers.set()
        self.hanging = 0
        self.before = self._wait

    def _wait(self, operation: Operation) -> None:
        if not self._answers.is_set():
            self.hanging += 1
            self._answers.wait()

    def hang(self) -> None:
        """Let calls wait from now on."""
        self.hanging = 0
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    @contextmanager
    def hangs(self) -> Iterator[None]:
        self.hang()
        try:
            yield
        finally:
            self.answer()


async def fill(client: Any, count: int, *, segments: int = 1, keys: int = 7) -> None:
    """Create the stream and write the numbers from 0 on."""
    await client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
    async with client.writer(STREAM) as writer:
        for number in range(count):
            await writer.write(b"%d" % number, routing_key=str(number % keys))
