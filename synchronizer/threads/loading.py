"""Loading modules when they are first used, in any thread, also while another thread forks the process."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ..errors import StoreUnavailableError
from .forks import ForksWait

_forks_wait: Final = ForksWait()
_in_thread: Final = threading.local()
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


@contextmanager
def loading() -> Iterator[None]:
    """Around an ``import`` in a function: a fork waits until it is done.

    Python locks a module while a thread loads it. A child that was forked meanwhile would wait forever for that lock.

    Raises:
        StoreUnavailableError: There was no file descriptor to read the module with. A later call can load it.
    """
    if getattr(_in_thread, "is_loading", False):
        yield
        return
    with _forks_wait:
        _in_thread.is_loading = True
        try:
            yield
        except (OSError, ImportError) as error:
            if not _is_for_want_of_descriptors(error):
                raise
            raise StoreUnavailableError(
                "a module cannot be read; check that the process has free file descriptors, and repeat the call",
                error=str(error),
            ) from error
        finally:
            _in_thread.is_loading = False


def _is_for_want_of_descriptors(error: OSError | ImportError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_DESCRIPTORS
    # The system's loader of compiled modules only gives the words.
    return any(os.strerror(code) in str(error) for code in _NO_DESCRIPTORS)
