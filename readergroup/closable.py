"""Objects that are closed, by their owner or at the end of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from synchronizer import ReaderGroupError


class Closable(Protocol):
    def close(self) -> None: ...


@runtime_checkable
class Stoppable(Protocol):
    """An object whose background work takes a while to end. `close` waits for it."""

    def stop(self) -> None:
        """Let the background work end, without waiting for it."""
        ...


def stop_each(opened: Iterable[object]) -> None:
    """Stop those that can be stopped, so that they end at the same time while they are closed one after the other."""
    for each in opened:
        if isinstance(each, Stoppable):
            each.stop()


def close_each(closes: Iterable[Callable[[], object]]) -> None:
    """Call each in order, also after an error of another one. The first error is raised at the end, with the others.

    An interrupt ends this: what closes later, such as the store, is still needed when the call is repeated.
    """
    failed: Exception | None = None
    for close in closes:
        try:
            close()
        except Exception as error:
            if failed is None:
                failed = error
            else:
                failed.add_note(f"Closing another part also failed: {error}")
    if failed is not None:
        raise failed


@contextmanager
def noted(error: BaseException | None, what: str) -> Iterator[None]:
    """Around ``what`` at the end of a block: if it fails, add that to ``error``, which ended the block, as a note.

    Otherwise the later error would hide the first one, which is often its cause.
    """
    try:
        yield
    except ReaderGroupError as failure:
        if error is None:
            raise
        error.add_note(f"{what} also failed: {failure}")
