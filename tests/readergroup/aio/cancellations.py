"""A cancellation at every place where a task waits, one place in each run.

A task can be cancelled only where it is suspended, so a call has few places. What makes a difference is how far the
thread behind it is: the call has not begun, waits for the store, or has returned while the task is yet to be resumed.
In the last case its outcome is lost unless the code looks for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.readergroup.aio.loops import HangingStore
from tests.waiting import PATIENCE_SECONDS

Call = Callable[[], Coroutine[Any, Any, object]]
#: At once; while a call of the store hangs; with the outcome there, and the task not yet resumed; at once, and where
#: the task waits next; at once, by a deadline.
Moment = Literal["at once", "in the store", "late", "twice", "by a deadline"]
MOMENTS: Final[Sequence[Moment]] = ("at once", "in the store", "late", "twice", "by a deadline")
#: A task is cancelled after this time, though what it waits for has not come, or has not called the store.
_MOMENT_SECONDS: Final = 0.1
#: How long the store hangs after the cancellation, so that what follows it overtakes the call.
_HANG_SECONDS: Final = 0.003


@dataclass(frozen=True)
class Cancelled:
    """One run."""

    place: str
    moment: Moment


async def cancellations(
    call: Call,
    store: HangingStore,
    *,
    before: Callable[[], Awaitable[object]] | None = None,
    moments: Sequence[Moment] = MOMENTS,
) -> AsyncIterator[Cancelled]:
    """Run ``call`` again and again, in a task that is cancelled at another place each time.

    The task must end with the cancellation. The caller looks after each run whether all is in order. ``before`` is
    called before each run.
    """
    for moment in moments:
        for number in itertools.count(1):
            if before is not None:
                await before()
            run = _Run(number, moment, store)
            await run.begin(call)
            if run.place is None:
                run.task.result()  # it ended without a cancellation
                break
            yield Cancelled(f"wait {number}, {moment}: {run.place}", moment)


class _Run:
    task: asyncio.Task[object]

    def __init__(self, number: int, moment: Moment, store: HangingStore) -> None:
        self._number = number
        self._moment = moment
        self._store = store
        self._waits = 0
        self._limit = asyncio.timeout(None)
        self._is_cancelled = False
        self.place: str | None = None

    async def begin(self, call: Call) -> None:
        self.task = asyncio.create_task(self._limited(_Observed(call(), self)))
        try:
            await asyncio.wait([self.task], timeout=PATIENCE_SECONDS)
        finally:
            self._store.answer()
        if self.place is None:
            return
        assert self.task.done(), f"it does not end after a cancellation {self._moment} at {self.place}"
        error = asyncio.CancelledError() if self.task.cancelled() else self.task.exception()
        expected = TimeoutError if self._moment == "by a deadline" else asyncio.CancelledError
        assert type(error) is expected, f"{error!r} after a cancellation {self._moment} at {self.place}"

    async def _limited(self, observed: _Observed) -> object:
        if self._moment != "by a deadline":
            return await observed
        async with self._limit:
            return await observed

    def before_step(self) -> None:
        if self._waits == self._number - 1 and self._moment == "in the store":
            self._store.hang()

    def after_step(self, awaited: object, place: str) -> None:
        self._waits += 1
        if self._waits == self._number:
            self.place = place
            self._cancel_soon(awaited)
        elif self._waits == self._number + 1 and self._moment == "twice":
            self.task.cancel()

    def _cancel_soon(self, awaited: object) -> None:
        loop = asyncio.get_running_loop()
        if self._moment == "by a deadline":
            self._limit.reschedule(loop.time())
        elif self._moment in ("at once", "twice"):
            self.task.cancel()
        elif not asyncio.isfuture(awaited):
            loop.call_soon(self._cancel)
        else:
            awaited.add_done_callback(self._cancel)  # before the task adds its own
            self._watch(loop.time() + _MOMENT_SECONDS)

    def _watch(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= until or (self._moment == "in the store" and self._store.hanging):
            self._cancel()
        elif not self._is_cancelled:
            loop.call_later(0.001, self._watch, until)

    def _cancel(self, *awaited: object) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()
            asyncio.get_running_loop().call_later(_HANG_SECONDS, self._store.answer)


class _Observed:
    """Awaits a coroutine, and tells the run of each step."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], run: _Run) -> None:
        self._coroutine = coroutine
        self._run = run

    def __await__(self) -> Generator[Any, Any, object]:
        error: BaseException | None = None
        while True:
            self._run.before_step()
            try:
                awaited = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as ended:
                return ended.value
            self._run.after_step(awaited, _shown(self._coroutine))
            error = None
            try:
                yield awaited
            except BaseException as raised:
                error = raised


def _shown(coroutine: Any) -> str:
    places = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append(f"{coroutine.__qualname__}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(places)
