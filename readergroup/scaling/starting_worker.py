"""Which kind of worker a task needs."""

from __future__ import annotations

from typing import TypeVar

from synchronizer.callables import is_async
from synchronizer.threads.loading import loading

from .in_hand import SharedHand
from .worker import Task, Worker

T = TypeVar("T")


def load_worker(task: Task[T]) -> None:
    """Load the modules that the workers of the task need, because a worker's thread loads none."""
    with loading():
        if task.sink is not None:
            from ..sinks import calls  # noqa: F401
            from . import sink_handler  # noqa: F401
        if task.concurrency > 1:
            from . import concurrent_worker  # noqa: F401
        elif is_async(task.handler):
            from . import awaiting  # noqa: F401


def new_worker(task: Task[T], reader_id: str, hand: SharedHand | None = None) -> Worker[T]:
    """Return a worker that shows in ``hand`` what it handles."""
    if task.concurrency == 1:
        return Worker(task, reader_id, None if hand is None else hand.open())
    with loading():
        from .concurrent_worker import ConcurrentWorker

    return ConcurrentWorker(task, reader_id, () if hand is None else hand.open_all())
