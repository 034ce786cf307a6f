"""Loading modules when they are first used, in any thread, also while another thread forks the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .forks import ForksWait

_forks_wait: Final = ForksWait()
_in_thread: Final = threading.local()


@contextmanager
def loading() -> Iterator[None]:
    """Around an ``import`` in a function: a fork waits until it is done.

    Python locks a module while a thread loads it. A child that was forked meanwhile would wait forever for that lock.
    """
    if getattr(_in_thread, "is_loading", False):
        yield
        return
    with _forks_wait:
        _in_thread.is_loading = True
        try:
            yield
        finally:
            _in_thread.is_loading = False
