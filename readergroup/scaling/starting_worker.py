"""Which kind of worker a task needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from synchronizer.callables import is_async
from synchronizer.threads.loading import loading

from .handlers import loop_of
from .in_hand import SharedHand
from .retry import DelayedRetry
from .worker import Task, Worker

T = TypeVar("T")


def load_worker(task: Task[T]) -> None:
    """Load the modules that the workers of the task need, because a worker's thread loads none."""
    with loading():
        if isinstance(task.retry, DelayedRetry):
            from ..retries import diverting  # noqa: F401
        if task.sink is not None:
            from ..sinks import calls  # noqa: F401
            from . import sink_handler  # noqa: F401
        if _is_concurrent(task):
            from . import concurrent_worker  # noqa: F401
        elif is_async(task.handler):
            from . import awaiting  # noqa: F401


def new_worker(task: Task[T], reader_id: str, hand: SharedHand | None = None) -> Worker[T]:
    """Return a worker that shows in ``hand`` what it handles."""
    if not _is_concurrent(task):
        return Worker(task, reader_id, None if hand is None else hand.open())
    with loading():
        from .concurrent_worker import ConcurrentWorker

    if task.concurrency == 1:
        task = replace(task, order="segment")
    return ConcurrentWorker(task, reader_id, () if hand is None else hand.open_all())


def _is_concurrent(task: Task[T]) -> bool:
    """Whether events run apart from the thread that reads: many at once, or on a loop of the application."""
    return task.concurrency > 1 or loop_of(task.handler) is not None
