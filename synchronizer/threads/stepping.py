"""Steps in place of background threads, on a clock that stands still until it is moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from ..errors import ClosedError, ReaderGroupError
from ..loggers import get_logger

_logger = get_logger(__name__)


@runtime_checkable
class Stepped(Protocol):
    """An object that works in the background: its threads alternate `step` and waiting, or a test calls `step`."""

    def step(self) -> float:
        """Do one round of the background work, and return when, on the clock, the next is due."""
        ...


def step_each(steps: Iterable[Callable[[], float | None]]) -> float:
    """Call each of ``steps``, and return when the first of them is due again. A step that returns None does not know.

    A step that raises a ``retryable`` error is logged, and repeated in the next round. A closed object has nothing to
    do. Any other error is raised at once.
    """
    due = math.inf
    for step in steps:
        try:
            known = step()
        except ClosedError:
            pass
        except ReaderGroupError as error:
            if not error.retryable:
                raise
            _logger.warning("%r is retried when the clock advances: %s", step, error)
        else:
            due = due if known is None else min(due, known)
    return due
