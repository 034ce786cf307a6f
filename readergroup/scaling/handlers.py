"""The functions that a pool calls."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

from synchronizer.callables import NotHandledError, is_async
from synchronizer.clock import growing_pause

from ..streams.event import Event, EventBatch

if TYPE_CHECKING:
    import asyncio

    import pyarrow

T = TypeVar("T")

#: A plain function, or an ``async def``.
HandleEvent = Callable[[Event[T]], object]
HandleBatch = Callable[[EventBatch[T]], object]
HandleArrow = Callable[["pyarrow.RecordBatch"], object]

#: With a sink they also get the connection, in the middle of its transaction.
HandleEventWith = Callable[[Event[T], Any], object]
HandleBatchWith = Callable[[EventBatch[T], Any], object]
HandleArrowWith = Callable[["pyarrow.RecordBatch", Any], object]

#: Which events a worker handles one after the other: those of a routing key, those of a segment, or none.
Order = Literal["key", "segment", "none"]


@dataclass(frozen=True)
class OnLoop:
    """Handles by an ``async def`` that runs on a loop of the application."""

    handle: Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.handle, follow_wrapped=False)

    async def __call__(self, *what: Any) -> object:
        return await self.handle(*what)


def loop_of(handler: object) -> asyncio.AbstractEventLoop | None:
    """Return the loop of the application that the handler runs on; None if its worker runs it."""
    if isinstance(handler, ArrowHandler):
        handler = handler.handle_arrow
    return handler.loop if isinstance(handler, OnLoop) else None


@dataclass(frozen=True)
class ArrowHandler:
    """Handles a batch by calling a function with its events as Arrow."""

    handle_arrow: Callable[..., Any]
    columns: Sequence[str] = field(repr=False)

    @classmethod
    def of(cls, handle_arrow: Callable[..., object], columns: Sequence[str]) -> ArrowHandler:
        return (_AsyncArrowHandler if is_async(handle_arrow) else cls)(handle_arrow, columns)

    def __call__(self, batch: EventBatch[Any], /, *connection: Any) -> object:
        return self.handle_arrow(batch.to_arrow(self.columns), *connection)


class _AsyncArrowHandler(ArrowHandler):
    """So that it is seen to be async."""

    async def __call__(self, batch: EventBatch[Any], /, *connection: Any) -> object:
        return await self.handle_arrow(batch.to_arrow(self.columns), *connection)


def pause_of_sink(failures: int) -> float:
    """Return the seconds until the next try while a sink's database does not answer."""
    return growing_pause(failures, first=0.05, most=5.0)


class _Forks:
    """Counts how often the line of this process was forked."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1


_forks: Final = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.note)


def contained(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a plain handler for which `exited` holds. A child that it forks ends where it leaves the handler."""
    forks = _forks.count

    def call(what: Any) -> object:
        try:
            return handle(what)
        except (Exception, NotHandledError):
            raise
        except BaseException as error:
            raise exited(error) from error
        finally:
            if _forks.count != forks:
                _end_child(sys.exception())

    return call


def _end_child(error: BaseException | None) -> NoReturn:
    """End this process, which would go on as a second worker, handle events again, and speak for the first."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    end_process(code & 0xFF)


def end_process(code: int) -> NoReturn:
    """End this process at once, without its threads. What it has printed is not lost."""
    for stream in sys.stdout, sys.stderr:
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def exited(error: BaseException) -> RuntimeError:
    """Return what a handler fails with that would end its thread, such as by ``sys.exit``.

    The next worker would get the same event, and end as well. In the main thread this raises the ``error`` itself: it
    may be an interrupt, or a signal that ends a worker process.
    """
    if threading.current_thread() is threading.main_thread():
        raise error
    return RuntimeError(f"the handler raised {type(error).__name__}, which ends no pool; use pool.stop: {error}")


class WorkerStoppedError(Exception):
    """The worker was stopped while it waited for the next attempt; the events in hand are not processed."""
