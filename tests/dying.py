"""A process that ends in a call of its store."""

from __future__ import annotations

import threading
from collections.abc import Callable

from synchronizer.testing import Operation


class Died(BaseException):
    """A process ends here."""


def dying_after(calls: int) -> Callable[[Operation], None]:
    """Return a hook for ``before`` or ``after`` of a `FailingStore`: every call after this many raises `Died`."""
    lock = threading.Lock()
    left = calls

    def die(operation: Operation) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left < 0:
                raise Died

    return die
