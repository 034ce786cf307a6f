"""Pools on the event loop: the pool supervises its workers in a thread, and ``async def`` handlers run on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from synchronizer import InvalidArgumentError
from synchronizer.arguments import check_duration
from synchronizer.callables import is_async

from ..forms import refuses_plain
from ..group.reader_group import ReaderGroup
from ..scaling.handlers import OnLoop
from .calls import Calls
from .facade import Facade, Plain

if TYPE_CHECKING:
    from ..scaling.pool import PoolWorker
    from ..scaling.pool import ReaderPool as SyncReaderPool

T = TypeVar("T")

#: As of the synchronous pool.
_DRAIN_SECONDS: Final = 25.0
_HANDLERS: Final = ("handle", "handle_batch", "handle_arrow")


async def open_pool(group: ReaderGroup, calls: Calls, *, workers: Any, **options: Any) -> ReaderPool[Any]:
    """Open a pool of the group, whose ``async def`` handler runs on this loop unless it runs in processes."""
    if workers == "thread":
        loop = asyncio.get_running_loop()
        for name in _HANDLERS:
            if is_async(options[name]):
                options[name] = OnLoop(options[name], loop)
    opened = await calls.run(partial(group.pool, workers=workers, **options), undo=lambda pool: pool.close())
    return ReaderPool(opened, calls)


@refuses_plain
class ReaderPool(Facade["SyncReaderPool[T]"], Generic[T]):
    """A pool of workers that read a group. It works during its ``async with`` block, or in `run`, and only once.

    Leaving the block stops the pool, waits until it has drained, and raises what ended it. A pool that fails inside the
    block logs its error and ends, and the block goes on: await `join`, look at `error`, or call `run` in a TaskGroup
    instead of the block.
    """

    def __init__(self, wrapped: SyncReaderPool[T], calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._ended: asyncio.Future[None] | None = None

    desired_readers = Plain(lambda pool: int(pool.desired_readers))

    @property
    def workers(self) -> Sequence[PoolWorker]:
        """The present workers, each with ``reader_id``, ``pid`` and a live ``alive``."""
        return self._wrapped.workers

    @property
    def error(self) -> BaseException | None:
        """The error that ended the pool; None while it works, and after a stop or the end of the data."""
        ended = self._ended
        return ended.exception() if ended is not None and ended.done() else None

    async def run(self, drain_timeout: float = _DRAIN_SECONDS) -> None:
        """Work until the group has read all data, or `stop` is called; then drain, and return.

        To drain, every worker finishes the events in hand and leaves the group. A cancelled call stops the pool and
        ends when it has drained; a second cancellation ends it at once. It handles no signals: let your loop call
        `stop`.

        Args:
            drain_timeout: Seconds until unfinished workers are ended. Other readers then handle their events again.
                Default: 25.

        Raises:
            HandlerError: An event could not be handled or set aside. Raised after the drain.
            InvalidArgumentError: The pool has run before.
        """
        ended = self._start(drain_timeout)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await self.close()
            raise

    def stop(self) -> None:
        """Let the pool drain and end, at once if it is run later. A signal handler of the loop may call this."""
        self._wrapped.stop()

    async def join(self) -> None:
        """Return when the pool has ended. Raise the error that ended it. A cancelled call does not stop it.

        Raises:
            InvalidArgumentError: The pool has not begun to work.
        """
        if self._ended is None:
            raise InvalidArgumentError("the pool does not run; enter its block, or call run")
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Stop, and return when the pool has drained. Closing twice is no error."""
        self.stop()
        ended = self._ended
        if ended is None:
            return
        if ended.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([ended])
        else:  # its loop has ended, and will not say when the pool has
            await self._calls.run(self._wrapped.close, waits=True, is_certain=True)

    def _start(self, drain_timeout: float = _DRAIN_SECONDS) -> asyncio.Future[None]:
        if self._ended is not None:
            raise InvalidArgumentError("a pool can run only once; create another with group.pool")
        check_duration(drain_timeout, "drain_timeout")
        thread = self._calls.single("pool")
        self._ended = ended = thread.start(partial(self._wrapped.run, drain_timeout), is_certain=True)
        self._calls.closed_first.add(self)
        thread.close()  # after the call
        ended.add_done_callback(self._on_end)
        return ended

    def _on_end(self, ended: asyncio.Future[None]) -> None:
        self._calls.closed_first.discard(self)

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
        failure = self.error
        if failure is not None and failure is not error:
            if error is None:
                raise failure
            error.add_note(f"The pool also failed: {failure}")
